"""Rank 0's schedule: continuous batching, chunked prefill, preemption of the newest request."""

from __future__ import annotations

from collections import deque

from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.request import FREE_SLOT, Request
from specreg.runtime.slots import SlotPool
from specreg.runtime.step import Admission, ScheduledRow, StepOutput, StepPlan

__all__ = ["Scheduler"]


class Scheduler:
    """Decides what each step computes. Holds every live request; knows no tensor.

    Args:
        slots: request state indices.
        blocks: KV blocks.
        max_model_len: positions a request may have.
        max_num_batched_tokens: tokens of one step at most.
        num_speculative_tokens: K; 0 without a speculator.
        prefill_lookahead: prompt tokens behind a chunk that the speculator reads. A chunk leaves no
            remainder or one of at least this length.
    """

    def __init__(
        self,
        *,
        slots: SlotPool,
        blocks: BlockAllocator,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        prefill_lookahead: int = 0,
    ) -> None:
        self.slots = slots
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_speculative_tokens = num_speculative_tokens
        self.prefill_lookahead = prefill_lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._step = 0
        self._released: list[int] = []
        self._batch: list[tuple[Request, ScheduledRow]] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether requests live, or the ranks have yet to hear of a slot that became free."""
        return bool(self.waiting or self.running or self._released)

    def schedule(self) -> StepPlan:
        """Plan the next step; requests that already run come first, oldest first."""
        self._batch = []
        admitted: list[Admission] = []
        budget = self.max_num_batched_tokens
        was_preempted = False
        position = 0
        while position < len(self.running):
            request = self.running[position]
            position += 1
            row = self._row_of(request, budget)
            if row is None:
                continue
            while not self._reserve(request, row):
                was_preempted = True
                if self._preempt_newest() is request:
                    break
            if request.slot == FREE_SLOT:
                break
            budget -= len(row.token_ids)
            self._add_row(request, row)
        while self.waiting and not was_preempted and (slot := self.slots.take()) is not None:
            request = self.waiting[0]
            request.slot = slot
            row = self._row_of(request, budget)
            if row is None or not self._reserve(request, row):
                request.slot = FREE_SLOT
                self.blocks.free(slot)
                self.slots.give_back(slot)
                break
            self.waiting.popleft()
            self.running.append(request)
            admitted.append(_admission(request))
            budget -= len(row.token_ids)
            self._add_row(request, row)
        plan = StepPlan(
            step=self._step,
            released=self._released,
            admitted=admitted,
            blocks=self.blocks.take_updates(),
            rows=[row for _, row in self._batch],
        )
        self._step += 1
        self._released = []
        return plan

    def update(self, output: StepOutput) -> list[Request]:
        """Apply what the last planned step produced; returns the requests that it took further."""
        went_on = []
        for (request, row), emitted, drafts, has_failed, logprobs in zip(
            self._batch,
            output.emitted,
            output.drafts,
            output.has_failed,
            output.logprobs,
            strict=True,
        ):
            num_rejected = row.num_logits - len(emitted)
            request.num_computed += len(row.token_ids) - num_rejected
            request.accept(emitted, logprobs, has_failed=has_failed)
            request.drafts = drafts[: max(0, request.max_len - len(request.token_ids) - 1)]
            if row.num_logits:
                went_on.append(request)
            if request.finish_reason is not None:
                self.running.remove(request)
                self._release(request)
        return went_on

    def cancel(self, request: Request) -> None:
        """Drop a live request between two steps: its slot and blocks are free for the next one."""
        request.finish_reason = "cancelled"
        if request.slot == FREE_SLOT:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)

    def _add_row(self, request: Request, row: ScheduledRow) -> None:
        if row.num_logits:
            row.bitmasks = request.bitmasks(row.token_ids[len(row.token_ids) - row.num_drafts :])
        self._batch.append((request, row))

    def _row_of(self, request: Request, budget: int) -> ScheduledRow | None:
        """The request's share of this step; None when the budget leaves it nothing to do."""
        pending = request.num_pending
        num_tokens = min(pending, budget)
        remainder = pending - num_tokens
        if 0 < remainder < self.prefill_lookahead:
            num_tokens -= self.prefill_lookahead - remainder
        if num_tokens <= 0:
            return None
        start, end = request.num_computed, request.num_computed + num_tokens
        row = ScheduledRow(
            slot=request.slot,
            start=start,
            token_ids=request.token_ids[start:end],
            num_logits=0,
            num_draft_tokens=0,
        )
        if num_tokens == pending:
            drafts = request.drafts[: budget - num_tokens] if pending == 1 else []
            row.token_ids = row.token_ids + drafts
            row.num_logits = 1 + len(drafts)
            # At least one token is emitted; each round can add one more than its drafts.
            room = request.max_len - len(request.token_ids) - 2
            row.num_draft_tokens = max(0, min(self.num_speculative_tokens, room))
        lookahead = request.token_ids[end : end + self.prefill_lookahead]
        row.next_prefill_tokens = lookahead + [-1] * (self.prefill_lookahead - len(lookahead))
        return row

    def _reserve(self, request: Request, row: ScheduledRow) -> bool:
        """Blocks for what the step reads and for the positions that drafting writes behind it.

        Those are the newest token's and K more: a block drafter has a row for each.
        """
        num_positions = row.start + len(row.token_ids)
        if row.num_logits and self.num_speculative_tokens:
            num_positions += self.num_speculative_tokens + 1
        return self.blocks.ensure(request.slot, min(num_positions, self.max_model_len))

    def _preempt_newest(self) -> Request:
        """Take slot and blocks from the request that came last; it will be recomputed."""
        newest = self.running.pop()
        self._release(newest)
        self.waiting.appendleft(newest)
        self.num_preemptions += 1
        return newest

    def _release(self, request: Request) -> None:
        self.blocks.free(request.slot)
        self.slots.give_back(request.slot)
        self._released.append(request.slot)
        request.reset()


def _admission(request: Request) -> Admission:
    params = request.params
    admission = Admission(
        slot=request.slot,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        logit_bias=[[token, bias] for token, bias in params.logit_bias.items()],
    )
    if params.allowed_token_ids is not None:
        admission.allowed_token_ids = list(params.allowed_token_ids)
    if params.has_penalties:
        admission.penalties = [
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]
        admission.prompt_token_ids = request.token_ids[: request.num_prompt_tokens]
        admission.output_token_ids = request.output_token_ids
    if params.wants_logprobs:
        admission.num_top_logprobs = params.logprobs or 0
        admission.logprob_token_ids = list(params.logprob_token_ids)
    return admission
