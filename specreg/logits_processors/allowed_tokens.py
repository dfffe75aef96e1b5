"""Tokens that a request may emit: a fixed set, or a bit mask a logits row."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
import torch.nn.functional as F
from torch import Tensor

from specreg.errors import TensorError
from specreg.logits_processors.protocol import rows_of_slots

__all__ = ["AllowedTokenBitmask", "AllowedTokenIds"]

WORD_BITS = 32


class AllowedTokenIds:
    """Every other token gets -inf, in every row of the request; see `LogitsProcessor`.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._ids: dict[int, Tensor] = {}

    @property
    def slots(self) -> Set[int]:
        return self._ids.keys()

    def set(self, slot: int, token_ids: Iterable[int]) -> None:
        """Let `slot` emit these tokens only, each below the vocabulary size."""
        unique = sorted(set(token_ids))
        self._ids[slot] = torch.tensor(unique, dtype=torch.int64, device=self._device)

    def release(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        for slot, rows in rows_of_slots(expanded_idx_mapping, self._ids):
            of_request, ids = logits[rows], self._ids[slot]
            kept = of_request.index_select(1, ids)
            of_request.fill_(-torch.inf).index_copy_(1, ids, kept)


class AllowedTokenBitmask:
    """Tokens whose bit is not set get -inf; each row has a mask of its own. See `LogitsProcessor`.

    Bit `t % 32` of word `t // 32` stands for token `t`. Words behind the vocabulary are ignored;
    where there are too few, the tokens that they lack are forbidden: a mask is made from a
    tokenizer, and the width of a model's head may be another.
    """

    def __init__(self) -> None:
        self._words: dict[int, Tensor] = {}

    @property
    def slots(self) -> Set[int]:
        return self._words.keys()

    def set(self, slot: int, words: Tensor) -> None:
        """Give the rows of `slot` their masks for this step, replacing those of the last.

        Args:
            slot: request state index.
            words: int32 `[num_rows, num_words]` where the logits are: a row a logits row, which is
                1 and the drafts that the request really has in this step.
        """
        self._words[slot] = words

    def release(self, slot: int) -> None:
        self._words.pop(slot, None)

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        """See `LogitsProcessor.apply`. Raises `TensorError` when a request has other rows."""
        for slot, rows in rows_of_slots(expanded_idx_mapping, self._words):
            of_request, words = logits[rows], self._words[slot]
            if len(words) != len(of_request):
                raise TensorError(
                    "a token mask does not fit the logits of its request",
                    where=f"AllowedTokenBitmask.set(words) of slot {slot}",
                    got=f"{len(words)} rows of words; allowed: {len(of_request)}, the request's "
                    "logits rows in this step",
                    fix="make one mask for each draft that the request has, and one more",
                )
            of_request.masked_fill_(~_bits(words, of_request.shape[1]), -torch.inf)


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """bool `[num_rows, vocab_size]` from int32 `words`; False behind them."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    bits = (words.unsqueeze(-1) >> shifts & 1).flatten(1).bool()[:, :vocab_size]
    return F.pad(bits, (0, vocab_size - bits.shape[1]), value=False)
