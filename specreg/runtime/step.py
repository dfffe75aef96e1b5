"""What rank 0 tells every rank to do in one step, and what comes back."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specreg.logprobs import TokenLogprobs

__all__ = ["Admission", "ScheduledRow", "StepOutput", "StepPlan", "decode_masks", "encode_masks"]

WORD_BYTES = 4


@dataclass
class Admission:
    """A request takes a slot: the sampling state that its owner keeps for it.

    Attributes:
        slot: request state index.
        temperature, top_k, top_p, min_p, seed: see `SamplingParams`.
        logit_bias: pairs of token id and bias.
        allowed_token_ids: None allows all.
        penalties: repetition, presence and frequency; None when all are neutral.
        prompt_token_ids, output_token_ids: what penalties look back at; empty without any.
        num_top_logprobs: None when no log probabilities are asked for.
        logprob_token_ids: tokens to report at every position.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: list[list[Any]] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    penalties: list[float] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    num_top_logprobs: int | None = None
    logprob_token_ids: list[int] = field(default_factory=list)


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
        bitmasks: allowed tokens of the logits rows, from `encode_masks`; empty without a grammar.
    """

    slot: int
    start: int
    token_ids: list[int]
    num_logits: int
    num_draft_tokens: int
    next_prefill_tokens: list[int] = field(default_factory=list)
    bitmasks: str = ""

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
    """What a step produced, on the host, one entry a scheduled row.

    Attributes:
        emitted: tokens that verification emitted; empty in mid-prefill.
        drafts: the new proposal, up to its first missing draft.
        num_nans: target logits rows of the request with a NaN, or with nothing above -inf.
        has_failed: the token behind `emitted` came from a row with nothing above -inf.
        logprobs: one an emitted token for a request that asks, on rank 0; else empty.
    """

    emitted: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    num_nans: list[int] = field(default_factory=list)
    has_failed: list[bool] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


def encode_masks(masks: Sequence[bytes]) -> str:
    """Masks as text that a plan can carry, all padded to the widest, in whole 32-bit words."""
    num_words = max(1, *(-(-len(mask) // WORD_BYTES) for mask in masks))
    padded = (mask.ljust(WORD_BYTES * num_words, b"\0") for mask in masks)
    return base64.b64encode(b"".join(padded)).decode()


def decode_masks(text: str) -> bytearray:
    """The inverse of `encode_masks`: one mask behind the other."""
    return bytearray(base64.b64decode(text))
