"""The schedule: who runs, in which slot, with which tokens."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specreg.logprobs import TokenLogprobs
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.request import Request
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.step import StepOutput, StepPlan
from specreg.sampling_params import SamplingParams


def make_request(index: int, prompt_len: int, max_tokens: int = 4) -> Request:
    return Request(
        index=index,
        token_ids=[100 * index + i for i in range(prompt_len)],
        num_prompt_tokens=prompt_len,
        max_len=prompt_len + max_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        seed=index,
    )


def make_scheduler(
    num_slots: int = 4,
    num_blocks: int = 64,
    block_size: int = 4,
    num_owners: int = 1,
    **options: int,
) -> Scheduler:
    settings = {"max_model_len": 256, "max_num_batched_tokens": 64, **options}
    return Scheduler(
        slots=SlotPool(num_slots, num_owners),
        blocks=BlockAllocator(num_blocks, block_size),
        **settings,
    )


def decide(plan: StepPlan, num_accepted: int = 0, drafts: Iterable[int] = ()) -> StepOutput:
    """Emit token 7 (after `num_accepted` drafts) wherever something is sampled."""
    emitted = []
    for row in plan.rows:
        accepted = row.token_ids[len(row.token_ids) - row.num_drafts :][:num_accepted]
        emitted.append([*accepted, 7] if row.num_logits else [])
    proposals = [
        list(drafts)[: row.num_draft_tokens] if row.num_logits else [] for row in plan.rows
    ]
    nothing: list[list[TokenLogprobs]] = [[] for _ in plan.rows]
    return StepOutput(emitted, proposals, [0] * len(nothing), [False] * len(nothing), nothing)


def test_a_long_prompt_is_read_in_chunks_and_sampled_only_at_its_end() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request(0, prompt_len=20))
    shares = []
    for _ in range(3):
        plan = scheduler.schedule()
        shares.append((len(plan.rows[0].token_ids), plan.rows[0].num_logits))
        scheduler.update(decide(plan))
    assert shares == [(8, 0), (8, 0), (4, 1)]


def test_a_chunk_never_leaves_a_remainder_shorter_than_the_look_ahead() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, prefill_lookahead=3)
    request = make_request(0, prompt_len=9)
    scheduler.add(request)
    plan = scheduler.schedule()
    (row,) = plan.rows
    assert len(row.token_ids) == 6
    assert row.next_prefill_tokens == [6, 7, 8]
    scheduler.update(decide(plan))
    (row,) = scheduler.schedule().rows
    assert row.next_prefill_tokens == [-1, -1, -1]


def test_drafts_are_verified_behind_the_newest_token_and_rejected_ones_are_recomputed() -> None:
    scheduler = make_scheduler(num_speculative_tokens=3)
    scheduler.add(make_request(0, prompt_len=5, max_tokens=20))
    scheduler.update(decide(scheduler.schedule(), drafts=(31, 32, 33)))
    plan = scheduler.schedule()
    (row,) = plan.rows
    assert (row.start, row.token_ids, row.num_logits) == (5, [7, 31, 32, 33], 4)
    scheduler.update(decide(plan, num_accepted=1, drafts=(41, 42, 43)))
    (row,) = scheduler.schedule().rows
    assert (row.start, row.token_ids) == (7, [7, 41, 42, 43])


def test_no_draft_is_asked_for_that_could_not_be_emitted() -> None:
    scheduler = make_scheduler(num_speculative_tokens=5)
    scheduler.add(make_request(0, prompt_len=5, max_tokens=4))
    plan = scheduler.schedule()
    assert plan.rows[0].num_draft_tokens == 2
    scheduler.update(decide(plan, drafts=(31, 32)))
    (row,) = scheduler.schedule().rows
    assert (row.num_drafts, row.num_draft_tokens) == (2, 1)


def test_a_request_has_blocks_for_its_newest_token_and_k_drafts_behind_it() -> None:
    scheduler = make_scheduler(block_size=4, num_speculative_tokens=3)
    scheduler.add(make_request(0, 4))
    plan = scheduler.schedule()
    # Positions 0 to 3 are read; drafting may write 4, which is the newest token's, to 7.
    assert sum(len(blocks) for _, _, blocks in plan.blocks) == 2
    scheduler.update(decide(plan, drafts=(31, 32, 33)))
    plan = scheduler.schedule()
    # Positions 4 to 7 are read; if all are accepted, drafting writes 8 to 11.
    assert sum(len(blocks) for _, _, blocks in plan.blocks) == 1


def test_a_full_pool_preempts_the_newest_request_which_then_carries_no_drafts() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, num_speculative_tokens=2)
    old, new = make_request(0, 6, max_tokens=12), make_request(1, 6, max_tokens=12)
    scheduler.add(old)
    scheduler.add(new)
    preempting = None
    for _ in range(6):
        plan = scheduler.schedule()
        if plan.released:
            preempting = plan
            break
        scheduler.update(decide(plan, num_accepted=2, drafts=(31, 32)))
    assert preempting is not None
    assert preempting.released == [1]
    assert [row.slot for row in preempting.rows] == [old.slot]
    assert (new.drafts, new.num_computed, scheduler.num_preemptions) == ([], 0, 1)
    assert len(new.output_token_ids) > 0


def test_a_released_slot_is_announced_before_it_is_taken_again() -> None:
    scheduler = make_scheduler(num_slots=1)
    scheduler.add(make_request(0, 3, max_tokens=1))
    scheduler.add(make_request(1, 3, max_tokens=1))
    scheduler.update(decide(scheduler.schedule()))
    plan = scheduler.schedule()
    assert (plan.released, [a.slot for a in plan.admitted]) == ([0], [0])
    scheduler.update(decide(plan))
    assert scheduler.has_work
    assert scheduler.schedule().released == [0]
    assert not scheduler.has_work


def test_slots_go_to_the_owner_with_the_fewest_live_requests() -> None:
    slots = SlotPool(max_num_seqs=7, num_owners=3)
    assert [slots.take() for _ in range(4)] == [0, 1, 2, 3]
    slots.give_back(1)
    assert slots.take() == 1
    slots.give_back(0)
    slots.give_back(3)
    assert slots.take() == 0
    assert len(slots) == 4


def test_more_requests_than_slots_wait() -> None:
    scheduler = make_scheduler(num_slots=2)
    for index in range(3):
        scheduler.add(make_request(index, 3))
    assert len(scheduler.schedule().rows) == 2


def test_a_plan_survives_the_broadcast() -> None:
    scheduler = make_scheduler(num_speculative_tokens=2, prefill_lookahead=1)
    scheduler.add(make_request(0, 3))
    plan = scheduler.schedule()
    assert StepPlan.from_bytes(plan.to_bytes()) == plan


@settings(max_examples=60, deadline=None)
@given(
    prompt_lens=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    num_slots=st.integers(1, 5),
    num_blocks=st.integers(12, 30),
    budget=st.integers(6, 40),
    lookahead=st.integers(0, 3),
    num_accepted=st.integers(0, 3),
    num_owners=st.integers(1, 3),
)
def test_every_request_ends_and_every_block_and_slot_comes_back(
    prompt_lens: list[int],
    num_slots: int,
    num_blocks: int,
    budget: int,
    lookahead: int,
    num_accepted: int,
    num_owners: int,
) -> None:
    scheduler = make_scheduler(
        num_slots=num_slots,
        num_blocks=num_blocks,
        num_owners=min(num_owners, num_slots),
        max_num_batched_tokens=budget,
        num_speculative_tokens=3,
        prefill_lookahead=lookahead,
        max_model_len=40,
    )
    requests = [make_request(i, n, max_tokens=9) for i, n in enumerate(prompt_lens)]
    for request in requests:
        scheduler.add(request)
    for _ in range(1000):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule()
        assert sum(len(row.token_ids) for row in plan.rows) <= budget
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        assert plan.rows or plan.released
        scheduler.update(decide(plan, num_accepted, drafts=(31, 32, 33)))
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == num_blocks
    assert len(scheduler.slots) == num_slots
    assert all(len(request.output_token_ids) == 9 for request in requests)


@pytest.mark.parametrize("num_positions", [1, 4, 5, 24])
def test_blocks_cover_the_positions_asked_for(num_positions: int) -> None:
    blocks = BlockAllocator(num_blocks=6, block_size=4)
    assert blocks.ensure(3, num_positions)
    ((slot, first, ids),) = blocks.take_updates()
    assert (slot, first, len(ids)) == (3, 0, -(-num_positions // 4))
    assert not blocks.ensure(2, 25)
    blocks.free(3)
    assert blocks.num_free == 6
