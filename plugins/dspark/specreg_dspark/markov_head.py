"""Markov heads: what the token before adds to the logits of a draft, through a low rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg_dspark.dspark_config import DSparkConfig

__all__ = ["GatedMarkovHead", "MarkovHead", "RecurrentMarkovHead", "make_markov_head"]


class MarkovHead(nn.Module):
    """The vanilla head: the bias is `W2 W1[previous]`. Others put features in between.

    Args:
        config: of the drafter; modules are on the meta device.

    Attributes:
        markov_w1: `[vocab_size, rank]`, by target id.
        markov_w2: `[draft_vocab_size, rank]`, by column of the draft head.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        backbone, self.rank = config.backbone, config.markov_rank
        self.hidden_size = backbone.shape.hidden_size
        self.markov_w1 = nn.Embedding(backbone.vocab_size, self.rank, device="meta")
        self.markov_w2 = nn.Linear(self.rank, backbone.draft_vocab_size, bias=False, device="meta")

    def embed(self, previous: Tensor) -> Tensor:
        """`[..., rank]` of target ids; -1, of a request that drafts nothing, counts as 0."""
        embedded: Tensor = self.markov_w1(previous.clamp(min=0))
        return embedded

    def begin(self, num_reqs: int) -> Tensor:
        """The state before the first step, `[num_reqs, rank]`."""
        return self.markov_w1.weight.new_zeros(num_reqs, self.rank)

    def forward(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            embedded: `[num_reqs, rank]`, of the token before.
            hidden: `[num_reqs, hidden_size]`, of the draft's row.
            state: `[num_reqs, rank]`, of the step before; of `begin` at first. Not written.

        Returns:
            What `bias` reads, `[num_reqs, rank]`; the next state.
        """
        del hidden
        return embedded, state

    def bias(self, features: Tensor) -> Tensor:
        """`[num_reqs, draft_vocab_size]`, rounded to the dtype of the weights."""
        return F.linear(features, self.markov_w2.weight)

    def bias_of(self, features: Tensor, columns: Tensor) -> Tensor:
        """Of each request's own columns `[num_reqs, num_columns]` alone."""
        rows = self.markov_w2.weight[columns]
        return torch.bmm(rows, features[:, :, None]).squeeze(2)


class GatedMarkovHead(MarkovHead):
    """The embedding of the token before, behind a gate of the row's state and itself."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(self.hidden_size + self.rank, self.rank, device="meta")

    def forward(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: the embedding `[num_reqs, rank]` times the gate of its hidden row.

        Args and Returns as of `MarkovHead.forward`: `[num_reqs, rank]`, and the state as it was.
        """
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
        return gate * embedded, state


class RecurrentMarkovHead(MarkovHead):
    """A small recurrent network over the drafts so far."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        width = 2 * self.rank + self.hidden_size
        self.joint_proj = nn.Linear(width, 3 * self.rank, device="meta")

    def forward(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the network.

        Args and Returns as of `MarkovHead.forward`: `[num_reqs, rank]` in (-1, 1), and the next
        state `[num_reqs, rank]`.
        """
        joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        keep, candidate, features = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        state = keep * state + (1 - keep) * torch.tanh(candidate)
        return torch.tanh(features), state


def make_markov_head(config: DSparkConfig) -> MarkovHead:
    """The head of the kind that the config names."""
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return kinds[config.markov_head](config)
