"""Slots that change hands: preempted requests come back elsewhere, and nothing old is ever read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ranks import run_ranks

from specreg.config import EngineConfig
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.request import Request
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.sampling_params import SamplingParams

BLOCK_SIZE = 8


class Drive(NamedTuple):
    """A run: tokens by request, slots that each was admitted to, and drafts verified."""

    tokens: list[list[int]]
    slots: list[list[int]]
    num_drafts: int


def poison(runner: ModelRunner, slots: set[int], value: float) -> None:
    """Make the rows of slots look freshly stored, with what would force acceptance, or NaN."""
    cache = runner.draft_logits
    assert cache is not None
    view = cache.view()
    for slot in slots:
        if cache.shard.owns(slot):
            row = cache.shard.row(slot)
            view.logits[row] = value
            view.temperature[row] = 1.0
            view.logsumexp[row] = value
            view.state[row] = 1


def drive(
    runner: ModelRunner,
    tp: TensorParallel,
    *,
    temperature: float,
    num_blocks: int,
    max_tokens: Sequence[int] = (30, 40),
    num_slots: int = 2,
    poison_value: float | None = None,
    spares_live: bool = True,
) -> Drive:
    scheduler = Scheduler(
        slots=SlotPool(num_slots, 2),
        blocks=BlockAllocator(num_blocks, BLOCK_SIZE),
        max_model_len=96,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
    )
    requests = [
        Request(
            index,
            [5 + index, 6, 7],
            3,
            3 + length,
            SamplingParams(max_tokens=length, temperature=temperature),
            seed=index,
        )
        for index, length in enumerate(max_tokens)
    ]
    for request in requests:
        scheduler.add(request)
    slots: list[list[int]] = [[] for _ in requests]
    num_drafts = 0
    while True:
        if tp.rank == 0:
            payload = scheduler.schedule().to_bytes() if scheduler.has_work else b""
        payload = tp.broadcast_bytes(payload if tp.rank == 0 else None)
        if not payload:
            break
        plan = StepPlan.from_bytes(payload)
        for admission in plan.admitted:
            slots[admission.seed].append(admission.slot)
        num_drafts += sum(row.num_drafts for row in plan.rows)
        output = runner.execute(plan)
        if poison_value is not None:
            live = {row.slot for row in plan.rows} if spares_live else set()
            poison(runner, set(range(num_slots)) - live, poison_value)
        if tp.rank == 0:
            scheduler.update(output)
    return Drive([request.output_token_ids for request in requests], slots, num_drafts)


def drive_arms(tp: TensorParallel) -> dict[str, Drive]:
    config = EngineConfig.parse(
        {
            "target": os.environ["TINY_TARGET"],
            "max_model_len": 96,
            "memory_budget_gib": 0.1,
            "max_num_seqs": 3,
            "block_size": BLOCK_SIZE,
            "tensor_parallel_size": 2,
            "enable_batch_sharded_sampling": True,
            "draft_logits_sharding": "require",
            "speculative": {
                "method": "draft_model",
                "model": os.environ["TINY_DRAFT"],
                "num_speculative_tokens": 3,
                "draft_sample_method": "probabilistic",
            },
        }
    )
    runner = ModelRunner(load_models(config, tp))
    arms: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "num_blocks": 99},
        "greedy, preempted": {"temperature": 0.0, "num_blocks": 7},
        "preempted": {"temperature": 0.9, "num_blocks": 7},
        "preempted, NaN": {"temperature": 0.9, "num_blocks": 7, "poison_value": float("nan")},
        "preempted, forced": {"temperature": 0.9, "num_blocks": 7, "poison_value": -1000.0},
    }
    arms["rows in use forced"] = {**arms["preempted, forced"], "spares_live": False}
    cycle = {"max_tokens": [9, 33, 21, 14, 28, 5, 17], "num_slots": 3}
    arms["cycle, greedy"] = {"temperature": 0.0, "num_blocks": 99, **cycle}
    arms["cycle, greedy, tight"] = {**arms["cycle, greedy"], "num_blocks": 8}
    arms["cycle, tight"] = {**arms["cycle, greedy, tight"], "temperature": 0.9}
    arms["cycle, tight, forced"] = {**arms["cycle, tight"], "poison_value": -1000.0}
    return {name: drive(runner, tp, **arm) for name, arm in arms.items()}


@pytest.fixture(scope="module")
def arms(
    tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Drive]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_TARGET", str(tiny_target))
        patch.setenv("TINY_DRAFT", str(tiny_draft))
        answers = run_ranks(2, drive_arms)
    assert isinstance(answers[0], dict)
    return answers[0]


def test_the_request_comes_back_in_a_slot_of_the_other_owner(arms: dict[str, Drive]) -> None:
    assert arms["greedy"].slots == [[0], [1]]
    for name, arm in arms.items():
        if name.startswith("preempted") or name.endswith("preempted"):
            first, *_, last = arm.slots[1]
            assert (first, last) == (1, 0), name
            assert arm.num_drafts > 10


def test_its_greedy_tokens_are_those_of_a_run_without_preemption(arms: dict[str, Drive]) -> None:
    assert arms["greedy, preempted"].tokens == arms["greedy"].tokens
    assert [len(tokens) for tokens in arms["greedy"].tokens] == [30, 40]


def test_no_row_of_a_slot_that_it_left_is_read(arms: dict[str, Drive]) -> None:
    """Idle rows look stored, with a draft distribution that accepts anything, or with NaN."""
    assert arms["preempted, NaN"].tokens == arms["preempted"].tokens
    assert arms["preempted, forced"].tokens == arms["preempted"].tokens
    assert arms["preempted"].tokens != arms["greedy"].tokens


def test_the_same_poison_in_rows_in_use_would_show(arms: dict[str, Drive]) -> None:
    assert arms["rows in use forced"].tokens != arms["preempted"].tokens


def test_requests_that_come_and_go_through_three_slots_read_only_what_is_theirs(
    arms: dict[str, Drive],
) -> None:
    tight = arms["cycle, tight"]
    assert arms["cycle, greedy, tight"].tokens == arms["cycle, greedy"].tokens
    assert arms["cycle, tight, forced"] == tight
    moves = [slots for slots in tight.slots if len({slot % 2 for slot in slots}) == 2]
    assert moves, "a request comes back at another owner"
    assert {slot for slots in tight.slots for slot in slots} == {0, 1, 2}
