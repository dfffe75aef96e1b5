"""What a run has done, counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from specreg.runtime.step import StepOutput, StepPlan

__all__ = ["RunStats"]


@dataclass
class RunStats:
    """Counters of one `generate` or `stream` call.

    Attributes:
        num_drafts: verification steps of a request that had at least one draft.
        num_draft_tokens: drafts verified.
        num_accepted_tokens: drafts accepted.
        num_accepted_by_position: accepted drafts by their index in the proposal.
        num_emitted_tokens: tokens that requests have kept.
        num_preemptions: requests that lost their slot and were recomputed.
        num_nans: logits rows of the target with a NaN, or with nothing above -inf; each counted
            once, by whoever verifies it.
        num_draft_nans: the same for the rows that drafts were sampled from.
        seconds: wall time of the steps.
        draft_logits_bytes_per_rank: the cache's logits, bytes.
        num_kv_blocks: blocks in a rank's KV pool.
        num_steps: steps of the engine.
        num_collectives: collectives of rank 0 by kind; empty on one rank.
        num_collective_bytes: bytes of their results on rank 0, its own share included.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    num_nans: int = 0
    num_draft_nans: int = 0
    seconds: float = 0.0
    draft_logits_bytes_per_rank: int = 0
    num_kv_blocks: int = 0
    num_steps: int = 0
    num_collectives: dict[str, int] = field(default_factory=dict)
    num_collective_bytes: dict[str, int] = field(default_factory=dict)

    def count(self, plan: StepPlan, output: StepOutput) -> None:
        """Count one step."""
        self.num_steps += 1
        for row, emitted in zip(plan.rows, output.emitted, strict=True):
            if row.num_drafts == 0:
                continue
            num_accepted = max(0, len(emitted) - 1)  # A request that fails may emit nothing.
            self.num_drafts += 1
            self.num_draft_tokens += row.num_drafts
            self.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self.num_accepted_by_position[position] += 1
        self.num_nans += sum(output.num_nans)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted draft tokens / verification steps; 1 without drafts."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of verification steps that accepted the draft at each index."""
        return [count / max(1, self.num_drafts) for count in self.num_accepted_by_position]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time."""
        return self.num_emitted_tokens / self.seconds if self.seconds else 0.0
