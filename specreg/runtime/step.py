"""What rank 0 tells every rank to do in one step, and what comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Admission", "ScheduledRow", "StepOutput", "StepPlan"]


@dataclass
class Admission:
    """A request takes a slot: the sampling state that every rank keeps for it."""

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass
class ScheduledRow:
    """One request's share of a step.

    Attributes:
        slot: request state index.
        start: position of the first token.
        token_ids: tokens to read; the last `num_logits - 1` are drafts.
        num_logits: logits rows wanted: 0 in mid-prefill, else 1 + the drafts to verify.
        num_draft_tokens: drafts wanted from the proposal after this step.
        next_prefill_tokens: prompt tokens behind the chunk, as many as the speculator looks ahead.
        history: all tokens so far, for a speculator that asks for them; else empty.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int
    num_draft_tokens: int
    next_prefill_tokens: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        """Drafts that this step verifies."""
        return max(0, self.num_logits - 1)


@dataclass
class StepPlan:
    """One step: first `released`, then `admitted`, then `blocks`, then `rows`.

    Attributes:
        step: counts the steps of the run.
        released: slots whose request ended or was preempted.
        admitted: requests that took a slot.
        blocks: (slot, first table index, block ids) appended to block tables.
        rows: the batch.
    """

    step: int
    released: list[int] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    blocks: list[tuple[int, int, list[int]]] = field(default_factory=list)
    rows: list[ScheduledRow] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Serialise for the broadcast."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> StepPlan:
        """The inverse of `to_bytes`."""
        fields: dict[str, Any] = json.loads(payload)
        return cls(
            step=fields["step"],
            released=fields["released"],
            admitted=[Admission(**admission) for admission in fields["admitted"]],
            blocks=[(slot, first, ids) for slot, first, ids in fields["blocks"]],
            rows=[ScheduledRow(**row) for row in fields["rows"]],
        )


@dataclass
class StepOutput:
    """What a step produced, on the host, one list a scheduled row.

    Attributes:
        emitted: tokens that verification emitted; empty in mid-prefill.
        drafts: the new proposal, up to its first missing draft.
        num_nans: NaN entries seen in the row's target logits.
    """

    emitted: list[list[int]]
    drafts: list[list[int]]
    num_nans: list[int]
