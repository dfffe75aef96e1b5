"""A rejection sampler whose acceptance is compared with what the distributions say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specreg.rejection_sampler import VerifyInputs, VerifyOutput
from specreg.testing.recording import RankLog

__all__ = ["RecordedRejectionSampler"]


class RecordedRejectionSampler:
    """Passes everything on to another rejection sampler, and counts accepted first drafts.

    A first draft drawn from q is accepted with probability sum min(p, q); one that is verified as
    one-hot, with p of the draft.

    Args:
        inner: verifies.
        log: gives the record to write to.
    """

    def __init__(self, inner: Callable[[VerifyInputs], VerifyOutput], log: Callable[[], RankLog]):
        self._inner = inner
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, inputs: VerifyInputs) -> VerifyOutput:
        output = self._inner(inputs)
        log, counts = self._log(), inputs.cu_num_logits.diff().tolist()
        log.idle_steps += not counts
        for row, slot in enumerate(inputs.idx_mapping.tolist()):
            draft = int(inputs.draft_tokens[row, 0]) if counts[row] > 1 else -1
            if slot < 0 or draft < 0:
                continue
            temperature = float(inputs.temperature[slot])
            p = _distribution(inputs.target_logits[int(inputs.cu_num_logits[row])], temperature)
            logits = log.newest_logits.get(slot)
            chance = float(p[draft])
            if inputs.draft_logits is not None and logits is not None:
                chance = float(torch.minimum(p, _distribution(logits, temperature)).sum())
            found = log.acceptance
            found.num_verified += 1
            found.observed += int(output.num_sampled[row]) > 1
            found.expected += chance
            found.variance += chance * max(0.0, 1 - chance)
        return output


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float().cpu()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    return (logits / temperature).softmax(0)
