"""Cells of a draft-logits cache in a larger buffer that shows every byte that was written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.draft_vocab import target_to_draft_table
from specreg.kernels.common.reference import clean_logits_reference
from specreg.ownership import Shard

__all__ = ["SentinelCells"]

SENTINEL = 0xA5
ALIGNMENT = 128  # elements, so that kernels find the cells aligned as a cache's are
TOLERANCE = 1e-4  # of a logsumexp; the weights of a block of 512 columns are rounded to 2^-21 each


class _Region:
    """Memory full of the sentinel: some elements in front, then `shape`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        cell = 1
        for size in shape[1:]:
            cell *= size
        front = -(-cell // ALIGNMENT) * ALIGNMENT
        flat = torch.empty(front + shape[0] * cell, dtype=dtype, device=device)
        self._flat = flat.view(torch.uint8).fill_(SENTINEL)
        self._front_bytes = front * flat.itemsize
        self.body = flat[front:].view(*shape)

    def is_changed(self) -> tuple[Tensor, Tensor]:
        """Bytes that differ: `[front]`, and `[rows, steps, bytes a cell]`."""
        changed = self._flat != SENTINEL
        front, body = changed[: self._front_bytes], changed[self._front_bytes :]
        return front, body.view(*self.body.shape[:2], -1)


class SentinelCells:
    """The cells of a whole batch, full of a sentinel, of which a view shows the first rows.

    Args:
        num_rows: rows of the buffer.
        shard: of the view, which has the rows that the shard's share of `num_rows` requests takes.
        layout, width, dtype: of a cell.
        num_steps: cells a row.
        vocab_size: columns of the target's vocabulary.
        target_ids: of a reduced vocabulary.
        device: where.
    """

    def __init__(
        self,
        num_rows: int,
        shard: Shard,
        layout: DraftLogitsLayout,
        width: int,
        dtype: torch.dtype,
        num_steps: int,
        vocab_size: int,
        target_ids: Tensor | None,
        device: torch.device,
    ) -> None:
        side = (num_rows, num_steps)
        self._shard = shard
        self._regions = {
            "logits": _Region((*side, width), dtype, device),
            "temperature": _Region((*side, 1), torch.float32, device),
            "logsumexp": _Region((*side, 1), torch.float32, device),
            "state": _Region((*side, 1), torch.uint8, device),
        }
        self.num_view_rows = -(-num_rows // shard.num_shards)
        shown = {name: r.body[: self.num_view_rows] for name, r in self._regions.items()}
        is_reduced = layout is DraftLogitsLayout.DRAFT_VOCAB and target_ids is not None
        self.view = DraftLogitsView(
            logits=shown["logits"],
            temperature=shown["temperature"].squeeze(2),
            logsumexp=shown["logsumexp"].squeeze(2),
            state=shown["state"].squeeze(2),
            shard=shard,
            layout=layout,
            vocab_size=vocab_size,
            target_to_draft=target_to_draft_table(target_ids, vocab_size)
            if is_reduced and target_ids is not None
            else None,
        )

    def touched(self, slots: Iterable[int]) -> str:
        """The first byte that has changed and may not, in words; empty when there is none.

        Args:
            slots: requests that may have been stored, where this shard owns them.
        """
        shard = self._shard
        allowed = [shard.row(slot) for slot in slots if shard.owns(slot)]
        of = f"rank {shard.shard_idx} of {shard.num_shards}"
        for name, region in self._regions.items():
            front, body = region.is_changed()
            if bool(front.any()):
                byte = 1 + _first(front.flip(0))[0]
                return f"as {of} it wrote {name} {byte} bytes before the cache"
            body[allowed] = False
            if bool(body.any()):
                row, step, byte = _first(body)
                which = (
                    f"behind the {self.num_view_rows} rows of its cache"
                    if row >= self.num_view_rows
                    else f"which is no row of a request that it owns and samples (rows {allowed})"
                )
                return f"as {of} it wrote byte {byte} of {name} in row {row}, step {step}, {which}"
        return ""

    def unwritten(self, slots: Iterable[int], stores_statistics: bool) -> str:
        """The first cell of these requests that was not stored, in words; empty for none.

        The state of a cell without a logit above -inf is that of an empty one, as `draft_sample`
        stores it: so it is where a table of the drafter has a NaN.

        Args:
            slots: requests of a batch; those that this shard owns are looked at.
            stores_statistics: whether temperature, logsumexp and state are to be stored too.
        """
        shard = self._shard
        owned = [shard.row(slot) for slot in slots if shard.owns(slot)]
        if not owned:
            return ""
        names = tuple(self._regions) if stores_statistics else ("logits",)
        for name in names:
            region = self._regions[name]
            changed = region.is_changed()[1][owned]
            written = changed.view(*changed.shape[:2], region.body.shape[2], -1).any(-1)
            if name == "state":
                is_empty = self._logits_of(owned).amax(2, keepdim=True) == -torch.inf
                written = region.body[owned] == torch.where(is_empty, CELL_EMPTY, CELL_STORED)
            if not bool(written.all()):
                index, step, column = _first(~written)
                return (
                    f"it left element {column} of {name} in row {owned[index]}, step {step} as it "
                    "was, and answered True"
                )
        return ""

    def unlike(
        self, slots: Sequence[int], tokens: Tensor, temperature: Tensor, stores_statistics: bool
    ) -> str:
        """The first cell whose draw or statistics are not those of the stored logits, in words.

        The draw of a request with temperature 0 has the largest logit of its row. Another one's
        tells nothing of its distribution.

        Args:
            slots: requests of a batch, -1 where there is none; those that this shard owns are
                looked at, all of whose cells are written.
            tokens: int64 `[len(slots), num_steps]`, target ids, in range.
            temperature: fp32 `[num_slots]`, what to draw at.
            stores_statistics: whether temperature and logsumexp were stored too.
        """
        shard = self._shard
        at = [index for index, slot in enumerate(slots) if shard.owns(slot)]
        if not at:
            return ""
        rows = [shard.row(slots[index]) for index in at]
        wanted = temperature[[slots[index] for index in at], None]
        logits = self._logits_of(rows)
        drawn = tokens[at]
        if self.view.target_to_draft is not None:
            drawn = self.view.target_to_draft[drawn].long()
        of_drawn = logits.gather(2, drawn.clamp(min=0)[..., None]).squeeze(2)
        is_largest = (of_drawn == logits.amax(2)) & (drawn >= 0)
        checks = [("it drew other than the largest of the logits in", is_largest | (wanted != 0))]
        if stores_statistics:
            stored, logsumexp = self.view.temperature[rows], self.view.logsumexp[rows]
            checks.append(("it stored another temperature than the request's in", stored == wanted))
            right = torch.logsumexp(logits / torch.where(wanted != 0, wanted, 1.0)[..., None], 2)
            is_close = torch.isclose(logsumexp, right, rtol=TOLERANCE, atol=TOLERANCE)
            has_none = (wanted == 0) | (logits.amax(2) == -torch.inf)
            checks.append(
                ("it stored another logsumexp than of the logits in", is_close | has_none)
            )
        for what, holds in checks:
            if not bool(holds.all()):
                index, step = _first(~holds)
                return f"{what} row {rows[index]}, step {step}"
        return ""

    def _logits_of(self, rows: list[int]) -> Tensor:
        """fp32 `[len(rows), num_steps, width]` as a draw reads them: NaN is -inf."""
        return clean_logits_reference(self._regions["logits"].body[rows])


def _first(flags: Tensor) -> tuple[int, ...]:
    """Index of the first true element; there is one. The others are not listed."""
    flat, index = int(flags.contiguous().view(torch.uint8).flatten().argmax()), []
    for size in reversed(flags.shape):
        flat, i = divmod(flat, size)
        index.append(i)
    return tuple(reversed(index))
