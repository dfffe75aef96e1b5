"""How likely a draft is accepted, told before it is drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specreg_dspark.dspark_config import DSparkConfig

__all__ = ["ConfidenceHead"]


class ConfidenceHead(nn.Module):
    """A probability of each draft from its row and the token before it, never from the draft.

    So a caller that drops drafts by it does not choose among what was drawn, and verification stays
    exact. Its weights are fp32 in a run of any dtype.

    Args:
        config: of the drafter; modules are on the meta device.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.reads_markov = config.confidence_reads_markov
        width = config.backbone.shape.hidden_size + self.reads_markov * config.markov_rank
        self.proj = nn.Linear(width, 1, device="meta")

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """fp32 `[num_reqs, num_steps]`.

        Args:
            hidden: `[num_reqs, num_steps, hidden_size]`, the drafts' rows.
            embedded: `[num_reqs, num_steps, rank]`, the Markov head's of the tokens before.
        """
        seen = hidden.float()
        if self.reads_markov:
            seen = torch.cat((seen, embedded.float()), dim=-1)
        return torch.sigmoid(self.proj(seen)).squeeze(-1)
