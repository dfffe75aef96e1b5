"""Log probabilities of emitted tokens, packed so that they travel with a step's other outputs.

They are those of the target itself: `log_softmax` in fp32 over all `vocab_size` columns of its
logits, at temperature 1, before any processor or cut-off. NaN counts as -inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.reference import clean_logits_reference
from specreg.kernels.common.upload import upload

__all__ = ["LogprobsFormat", "LogprobsQuery", "TokenLogprobs"]

# fp32 elements worked on at a time.
CHUNK_ELEMENTS = 2**24


class TokenLogprobs(NamedTuple):
    """Natural log probabilities at one emitted position.

    Attributes:
        token_id: the emitted token.
        logprob: its own.
        top: the most probable tokens with theirs, as many as were asked for, descending.
        asked: the tokens that were asked for by id with theirs, in the order of asking.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    asked: tuple[tuple[int, float], ...] = ()


class LogprobsQuery(NamedTuple):
    """What a request wants to know.

    Attributes:
        num_top: most probable tokens a position.
        token_ids: tokens to report at every position.
    """

    num_top: int = 0
    token_ids: tuple[int, ...] = ()


class LogprobsFormat(NamedTuple):
    """The columns of a packed position, wide enough for every query of a batch.

    Columns: the emitted token's log probability, the ids of the top tokens, their log
    probabilities, then those of the tokens asked for. All are int64; a log probability is the 32
    bits of its fp32.

    Attributes:
        num_top: most probable tokens a position.
        num_asked: tokens asked for by id a position.
    """

    num_top: int
    num_asked: int

    @classmethod
    def of(cls, queries: Iterable[LogprobsQuery]) -> LogprobsFormat | None:
        """The format for a batch; None when nobody asks."""
        queries = list(queries)
        if not queries:
            return None
        return cls(
            max(query.num_top for query in queries), max(len(query.token_ids) for query in queries)
        )

    @property
    def width(self) -> int:
        """Columns a position."""
        return 1 + 2 * self.num_top + self.num_asked

    def pack(self, logits: Tensor, token_ids: Tensor, query: LogprobsQuery) -> Tensor:
        """Work out what a request asks, without host synchronisation.

        Args:
            logits: `[num_logits, vocab_size]`, rows of the request; not written to.
            token_ids: int64 `[num_logits]`, the token emitted at each; any below the vocabulary
                size where none is.
            query: of the request.

        Returns:
            int64 `[num_logits, width]`; columns that the request did not ask for are undefined.
        """
        asked = upload(torch.tensor(query.token_ids, dtype=torch.int64), logits.device)
        size = max(1, CHUNK_ELEMENTS // logits.shape[1])
        parts = [
            self._pack(rows, ids, asked, query.num_top)
            for rows, ids in zip(
                torch.split(logits, size), torch.split(token_ids, size), strict=True
            )
        ]
        return torch.cat(parts)

    def _pack(self, logits: Tensor, token_ids: Tensor, asked: Tensor, num_top: int) -> Tensor:
        logprobs = clean_logits_reference(logits).log_softmax(1)
        top = logprobs.topk(num_top)
        packed = token_ids.new_zeros(len(logits), self.width)
        packed[:, 0] = _bits(logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1))
        packed[:, 1 : 1 + num_top] = top.indices
        packed[:, 1 + self.num_top :][:, :num_top] = _bits(top.values)
        packed[:, 1 + 2 * self.num_top :][:, : len(asked)] = _bits(logprobs[:, asked])
        return packed

    def unpack(
        self, packed: Tensor, token_ids: Sequence[int], query: LogprobsQuery
    ) -> list[TokenLogprobs]:
        """What `pack` worked out, for each emitted token.

        Args:
            packed: int64 `[>= len(token_ids), width]` on the host.
            token_ids: the emitted tokens.
            query: of the request.
        """
        packed = packed[: len(token_ids)]
        values = packed.to(torch.int32).view(torch.float32).tolist()
        ids = packed[:, 1 : 1 + query.num_top].tolist()
        first, last = 1 + self.num_top, 1 + 2 * self.num_top
        return [
            TokenLogprobs(
                token_id=token,
                logprob=row[0],
                top=tuple(zip(top, row[first:last], strict=False)),
                asked=tuple(zip(query.token_ids, row[last:], strict=False)),
            )
            for token, row, top in zip(token_ids, values, ids, strict=True)
        ]


def _bits(logprobs: Tensor) -> Tensor:
    return logprobs.contiguous().view(torch.int32).to(torch.int64)
