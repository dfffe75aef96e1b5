"""Verification of the requests that a rank owns: processors, the rejection sampler, reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsCache
from specreg.kernels.common.upload import upload
from specreg.logprobs import LogprobsFormat
from specreg.rejection_sampler import VerifyInputs, VerifyOutput, check_receives
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState

__all__ = ["OwnedBatch", "Verified", "Verifier"]

# Elements of fp32 rows with processors that exist at a time, or one request's.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class OwnedBatch:
    """The requests to verify.

    Attributes:
        idx_mapping: int64 `[num_reqs]` on the host, request state indices; -1 is a padding row.
        cu_num_logits: int64 `[num_reqs + 1]` on the host, offsets of their logits rows.
        draft_tokens: int64 `[num_reqs, num_speculative_tokens]`, -1 padded, on the device.
        positions: int64 `[num_reqs]`, position of the first token decided, on the device.
    """

    idx_mapping: Tensor
    cu_num_logits: Tensor
    draft_tokens: Tensor
    positions: Tensor

    @property
    def expanded_idx_mapping(self) -> Tensor:
        """int64 `[num_logits]` on the host."""
        return self.idx_mapping.repeat_interleave(self.cu_num_logits.diff())

    @property
    def expanded_local_pos(self) -> Tensor:
        """int64 `[num_logits]` on the host: index of each row in its request."""
        starts = self.cu_num_logits[:-1].repeat_interleave(self.cu_num_logits.diff())
        return torch.arange(len(starts)) - starts

    @property
    def expanded_draft_tokens(self) -> Tensor:
        """int64 `[num_logits]` on the device: the draft that each row judges; -1 in the last."""
        counts = self.cu_num_logits.diff()
        requests = torch.arange(len(counts)).repeat_interleave(counts)
        places = requests * (self.draft_tokens.shape[1] + 1) + self.expanded_local_pos
        judged = torch.nn.functional.pad(self.draft_tokens, (0, 1), value=-1).flatten()
        return judged[upload(places, judged.device)]

    def without(self, rows: Sequence[int]) -> OwnedBatch:
        """The same batch with some requests turned into padding."""
        return replace(self, idx_mapping=self.idx_mapping.index_fill(0, torch.tensor(rows), -1))

    def part(self, rows: Sequence[int]) -> tuple[OwnedBatch, Tensor]:
        """Some of the requests, and the index of their logits rows in those of this batch."""
        index = torch.tensor(rows)
        counts, starts = self.cu_num_logits.diff()[index], self.cu_num_logits[index]
        on_device = upload(index, self.positions.device)
        part = OwnedBatch(
            idx_mapping=self.idx_mapping[index],
            cu_num_logits=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
            draft_tokens=self.draft_tokens[on_device],
            positions=self.positions[on_device],
        )
        return part, starts.repeat_interleave(counts) + part.expanded_local_pos


class Verified(NamedTuple):
    """What a rank decided for its requests, all int64.

    Attributes:
        sampled: `[num_reqs, num_speculative_tokens + 1]`, -1 padded.
        num_sampled: `[num_reqs]`.
        num_nans: `[num_reqs]`, target logits rows with a NaN, or with nothing above -inf; counted
            behind the processors where a request has some.
        num_usable: `[num_reqs]`, leading sampled tokens that their row gives a probability: fewer
            than `num_sampled` when a row has nothing above -inf.
        logprobs: `[num_reqs, (num_speculative_tokens + 1) * width]`, the positions packed one
            behind the other; width 0 when nobody asks.
    """

    sampled: Tensor
    num_sampled: Tensor
    num_nans: Tensor
    num_usable: Tensor
    logprobs: Tensor


class Verifier:
    """Decides the tokens of the requests that this rank owns.

    Requests with processors are judged on fp32 copies of their rows, a bounded number at a time;
    all others on the logits as they are, untouched and uncopied.

    Args:
        rejection_sampler: judges; stock or a plugin's.
        state: sampling parameters by slot.
        processors: what requests ask to be done to their logits.
        draft_logits: what this rank keeps of the draft distributions.
        vocab_size: columns that are tokens.

    Raises:
        InternalError: a sharded cache with a rejection sampler that does not accept one.
    """

    def __init__(
        self,
        rejection_sampler: Callable[[VerifyInputs], VerifyOutput],
        state: SlotState,
        processors: SlotProcessors,
        draft_logits: DraftLogitsCache | None,
        vocab_size: int,
    ) -> None:
        check_receives(rejection_sampler, draft_logits)
        self._rejection_sampler = rejection_sampler
        self._state = state
        self._processors = processors
        self._draft_logits = draft_logits
        self._vocab_size = vocab_size

    def __call__(
        self, logits: Tensor, batch: OwnedBatch, logprobs: LogprobsFormat | None
    ) -> Verified:
        """Decide a batch. The host is not waited for, save by a cut-off of a request.

        Args:
            logits: `[num_logits, >= vocab_size]` of the target; not written to.
            batch: the requests.
            logprobs: how log probabilities are packed, the same on all ranks; None packs none.
        """
        slots = batch.idx_mapping.tolist()
        changed = [row for row, slot in enumerate(slots) if self._processors.works_for(slot)]
        judged = self._judge(logits, batch.without(changed) if changed else batch)
        for part, rows, index in self._chunks(batch, changed):
            own = logits[:, : self._vocab_size][upload(rows, logits.device)].float()
            self._processors.apply(
                own, part.expanded_idx_mapping, part.expanded_local_pos, part.expanded_draft_tokens
            )
            judged = [
                whole.index_copy(0, upload(index, whole.device), piece)
                for whole, piece in zip(judged, self._judge(own, part), strict=True)
            ]
        sampled, num_sampled, num_nans, num_usable = judged
        packed = self._pack_logprobs(logits, batch, sampled, logprobs)
        return Verified(sampled, num_sampled, num_nans, num_usable, packed)

    def _chunks(
        self, batch: OwnedBatch, rows: Sequence[int]
    ) -> Iterator[tuple[OwnedBatch, Tensor, Tensor]]:
        """Requests at `rows` in parts of bounded size: part, its logits rows, its batch rows."""
        most = max(1, CHUNK_ELEMENTS // self._vocab_size)
        counts = batch.cu_num_logits.diff().tolist()
        chunk: list[int] = []
        for row in rows:
            if chunk and sum(counts[r] for r in chunk) + counts[row] > most:
                yield (*batch.part(chunk), torch.tensor(chunk))
                chunk = []
            chunk.append(row)
        if chunk:
            yield (*batch.part(chunk), torch.tensor(chunk))

    def decide(self, inputs: VerifyInputs) -> list[Tensor]:
        """`sampled`, `num_sampled`, `num_nans` and `num_usable` of `Verified`, on logits as given.

        Shapes follow from those of `inputs`; without cut-offs nothing waits for the host.
        """
        sampled, num_sampled, num_nans = self._rejection_sampler(inputs)
        num_usable = _num_usable(inputs.target_logits, inputs.cu_num_logits, sampled, num_sampled)
        return [tensor.to(torch.int64) for tensor in (sampled, num_sampled, num_nans, num_usable)]

    def _judge(self, logits: Tensor, batch: OwnedBatch) -> list[Tensor]:
        device, state = logits.device, self._state
        return self.decide(
            VerifyInputs(
                target_logits=logits,
                draft_tokens=batch.draft_tokens,
                idx_mapping=upload(batch.idx_mapping, device),
                expanded_idx_mapping=upload(batch.expanded_idx_mapping, device),
                cu_num_logits=upload(batch.cu_num_logits, device),
                positions=batch.positions,
                temperature=state.temperature,
                seeds=state.seeds,
                top_k=state.top_k,
                top_p=state.top_p,
                min_p=state.min_p,
                has_cutoffs=state.has_cutoffs(batch.idx_mapping.tolist()),
                draft_logits=self._draft_logits,
            )
        )

    def _pack_logprobs(
        self, logits: Tensor, batch: OwnedBatch, sampled: Tensor, layout: LogprobsFormat | None
    ) -> Tensor:
        num_reqs, num_positions = sampled.shape
        if layout is None:
            return sampled.new_zeros(num_reqs, 0)
        packed = sampled.new_zeros(num_reqs, num_positions, layout.width)
        offsets = batch.cu_num_logits.tolist()
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            query = self._state.logprob_queries.get(slot)
            num_rows = offsets[row + 1] - offsets[row]
            if query is not None and num_rows:
                packed[row, :num_rows] = layout.pack(
                    logits[offsets[row] : offsets[row + 1], : self._vocab_size],
                    sampled[row, :num_rows].clamp(min=0),
                    query,
                )
        return packed.flatten(1)


def _num_usable(
    logits: Tensor, cu_num_logits: Tensor, sampled: Tensor, num_sampled: Tensor
) -> Tensor:
    """How many leading tokens of each request have a logit above -inf in the row they came from.

    Every draw, and so every token, has one; but a row that offers nothing gives some token all the
    same. Reads one element a token.
    """
    if not len(logits):
        return torch.zeros_like(num_sampled)
    steps = torch.arange(sampled.shape[1], device=logits.device)
    rows = (cu_num_logits[:-1, None] + steps).clamp(max=len(logits) - 1)
    is_possible = logits[rows, sampled.clamp(min=0)] > -torch.inf
    return (is_possible & (steps < num_sampled[:, None])).long().cumprod(1).sum(1)
