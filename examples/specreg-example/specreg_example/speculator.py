"""A drafter without weights: statistics over the tokens of the request itself."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.speculator import (
    DraftOutput,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg_example.options import SuffixCountsOptions

__all__ = ["SuffixCountsSpeculator"]

# A sighting behind the same two tokens also counts as one behind the same token.
PAIR_WEIGHT, TRIPLE_WEIGHT = 1, 8


class SuffixCountsSpeculator(SpeculatorBase):
    """Scores a token by how often it followed the last one and the last two in this request.

    Logits are `log(weight + unseen_mass / vocab_size)`: a distribution over the whole vocabulary,
    so drafts can be drawn from it and verified against it. Weights are counted in integers and
    logits are looked up in a table, so they do not depend on the batch in any bit.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        max_num_seqs, device = context.config.max_num_seqs, context.device
        # Column 0 stays -1: the first token of a request has none before it.
        self.history = torch.full((max_num_seqs, context.max_model_len + 1), -1, device=device)
        self.num_known = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.logits_by_weight = torch.empty(0, device=device)
        self.vocab_size = 0

    def load_model(self, target: TargetView) -> None:
        """Tabulate the logit of every weight that can occur."""
        options = self.context.options
        assert isinstance(options, SuffixCountsOptions)
        self.vocab_size = target.vocab_size
        most = (PAIR_WEIGHT + TRIPLE_WEIGHT) * self.context.max_model_len
        weights = torch.arange(most + 1, dtype=torch.float64)
        logits = torch.log(weights + options.unseen_mass / self.vocab_size)
        self.logits_by_weight = logits.to(self.history.device, torch.float32)

    def weight_bytes(self) -> int:
        return self.logits_by_weight.nbytes + self.history.nbytes

    def prepare(self, inputs: ProposeInputs) -> None:
        """Copy the tokens of each request into the buffer that `draft` reads."""
        history, num_reqs = inputs.token_history, inputs.num_reqs
        assert history is not None
        width = history.shape[1]
        self.history[:num_reqs, 1 : 1 + width] = history
        self.history[:num_reqs, 1 + width :] = -1
        self.num_known[:num_reqs] = (history >= 0).sum(1)

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """One draft a step: score, sample, and go on from the draft."""
        assert self.sampler is not None
        history, num_known = self.history[:num_reqs_padded], self.num_known[:num_reqs_padded]
        last = history.gather(1, num_known[:, None]).squeeze(1)
        before = history.gather(1, (num_known - 1).clamp(min=0)[:, None]).squeeze(1)
        drafts: list[Tensor] = []
        for step in range(self.num_speculative_tokens):
            logits = self._score(history, before, last)
            drafts.append(self.sampler.sample(logits, step, num_known + step))
            before, last = last, drafts[-1]
        return DraftOutput(torch.stack(drafts, dim=1))

    def _score(self, history: Tensor, before: Tensor, last: Tensor) -> Tensor:
        """Logits `[num_reqs, vocab_size]` of the token behind `before, last`."""
        followers = history[:, 2:]
        is_pair = (history[:, 1:-1] == last[:, None]) & (followers >= 0)
        is_triple = is_pair & (history[:, :-2] == before[:, None])
        weights = PAIR_WEIGHT * is_pair.long() + TRIPLE_WEIGHT * is_triple.long()
        by_token = torch.zeros(
            len(history), self.vocab_size, dtype=torch.int64, device=history.device
        )
        by_token.scatter_add_(1, followers.clamp(min=0), weights)
        return self.logits_by_weight[by_token]
