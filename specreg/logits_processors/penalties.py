"""Penalties for tokens that a request has used before."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.upload import upload
from specreg.logits_processors.protocol import rows_of_slots

__all__ = ["Penalties"]


class _Usage(NamedTuple):
    """A request's factors and what it has used: bool `in_prompt [V]`, int32 `in_output [V]`."""

    repetition: float
    presence: float
    frequency: float
    in_prompt: Tensor
    in_output: Tensor


class Penalties:
    """Repetition, frequency and presence penalties, in this order; see `LogitsProcessor`.

    With `n` the number of times that token `t` was emitted, the drafts before the row included:

        t in the prompt or n > 0:  logits[t] = logits[t] / repetition if logits[t] > 0
                                               logits[t] * repetition otherwise
        logits[t] -= frequency * n + presence * (n > 0)

    These are the rules of vLLM and of the OpenAI interface. A request with penalties keeps two
    vectors over the vocabulary, 5 bytes a token; others keep nothing.

    Args:
        vocab_size: columns of the logits.
        device: of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._usages: dict[int, _Usage] = {}

    @property
    def slots(self) -> Set[int]:
        return self._usages.keys()

    def set(
        self,
        slot: int,
        *,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
    ) -> None:
        """Give `slot` its factors and its history; 1, 0 and 0 penalise nothing.

        Args:
            slot: request state index.
            prompt, output: token ids, each below the vocabulary size. A request that is resumed
                brings what it had emitted.
            repetition: above 1 discourages, below 1 encourages.
            presence, frequency: above 0 discourages, below 0 encourages.
        """
        in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        in_prompt[torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True
        used = torch.tensor(output, dtype=torch.int64, device=self._device)
        in_output = torch.bincount(used, minlength=self._vocab_size).int()
        self._usages[slot] = _Usage(repetition, presence, frequency, in_prompt, in_output)

    def release(self, slot: int) -> None:
        self._usages.pop(slot, None)

    def count(self, slots: Sequence[int], sampled: Tensor) -> None:
        """Count what a step has emitted, without host synchronisation.

        Args:
            slots: request state index of each row.
            sampled: int64 `[num_reqs, n]` where the logits are; -1 where nothing was emitted.
        """
        for row, slot in enumerate(slots):
            if (usage := self._usages.get(slot)) is not None:
                tokens = sampled[row]
                usage.in_output.index_add_(0, tokens.clamp(min=0), (tokens >= 0).int())

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        for slot, rows in rows_of_slots(expanded_idx_mapping, self._usages):
            counts = _count_prefixes(
                self._usages[slot].in_output, expanded_local_pos[rows], draft_tokens[rows]
            )
            _penalise(logits[rows], self._usages[slot], counts)


def _count_prefixes(in_output: Tensor, local_pos: Tensor, drafts: Tensor) -> Tensor:
    """int32 `[num_rows, V]`: `in_output` and, in each row, the drafts of the rows before it."""
    counts = in_output.repeat(len(drafts), 1)
    is_before = local_pos.unsqueeze(1) > local_pos.unsqueeze(0)
    rows, before = upload(is_before.nonzero().T.contiguous(), drafts.device)
    tokens = drafts[before]
    is_token = (tokens >= 0) & (tokens < in_output.numel())
    tokens = torch.where(is_token, tokens, 0)
    return counts.index_put_((rows, tokens), is_token.int(), accumulate=True)


def _penalise(logits: Tensor, usage: _Usage, counts: Tensor) -> None:
    is_emitted = counts > 0
    if usage.repetition != 1:
        is_used = is_emitted | usage.in_prompt
        penalised = torch.where(logits > 0, logits / usage.repetition, logits * usage.repetition)
        logits.copy_(torch.where(is_used, penalised, logits))
    if usage.frequency:
        logits.sub_(counts * usage.frequency)
    if usage.presence:
        logits.sub_(is_emitted * usage.presence)
