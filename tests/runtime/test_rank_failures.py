"""A rank that dies or disagrees ends the run in seconds, with its reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from specreg.config import EngineConfig
from specreg.errors import ConfigError, RankDivergenceError, RankFailedError
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.engine import Engine
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.request import Request
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.sampling_params import SamplingParams
from specreg.speculator import DraftOutput

SECONDS_TO_NOTICE = 20  # Measured: under 2; the rest is for a busy machine.


def config_of(target: Path, draft: Path, num_ranks: int = 2, **extra: Any) -> EngineConfig:
    return EngineConfig.parse(
        {
            "target": str(target),
            "max_model_len": 96,
            "memory_budget_gib": 0.1,
            "tensor_parallel_size": num_ranks,
            "enable_batch_sharded_sampling": True,
            "speculative": {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": 3,
                "draft_sample_method": "probabilistic",
            },
            **extra,
        }
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_killed_rank_ends_the_run_in_seconds_and_is_named(
    tiny_target: Path, tiny_draft: Path, num_ranks: int
) -> None:
    with Engine.from_config(config_of(tiny_target, tiny_draft, num_ranks)) as engine:
        victim = engine.process_ids[-1]
        killed_at = 0.0

        def kill(_: int) -> None:
            nonlocal killed_at
            os.kill(victim, signal.SIGKILL)
            killed_at = killed_at or time.monotonic()

        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 60)]
        with pytest.raises(RankFailedError, match="killed by signal 9") as error:
            engine.generate(["abc", "hello world"], params, on_finish=kill)
        assert time.monotonic() - killed_at < SECONDS_TO_NOTICE
        assert error.value.where == f"rank {num_ranks - 1} of {num_ranks}"
        with pytest.raises(ConfigError, match="was closed"):
            engine.generate(["again"])


def test_an_error_that_every_rank_meets_while_loading_is_told_once_and_leaves_no_group(
    tiny_target: Path, tiny_draft: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot hold one request"):
        Engine.from_config(config_of(tiny_target, tiny_draft, num_kv_blocks=1))
    assert not torch.distributed.is_initialized()


def test_a_worker_that_cannot_start_is_told_apart_from_one_that_lost_its_peer(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankFailedError, match="exit status 7 without a message"):
        Engine.from_config(config_of(tiny_target, tiny_draft))


def gather_after_an_abort(tp: TensorParallel) -> list[str]:
    """What a rank says once it has given its group up, and how it leaves."""
    errors = []
    tp.all_gather(torch.ones(2))
    tp.abort()
    tp.abort()
    calls: list[Callable[[], object]] = [
        tp.raise_if_aborted,
        lambda: tp.all_gather(torch.ones(2)),
        lambda: tp.all_to_all_rows(torch.ones(2, 3), [1, 1], [1, 1]),
    ]
    for call in calls:
        try:
            call()
        except RankFailedError as error:
            errors.append(error.got)
    tp.close()
    tp.close()
    return errors


def test_nothing_is_launched_in_a_group_that_was_aborted() -> None:
    for errors in run_ranks(2, gather_after_an_abort):
        assert errors == ["NCCL was aborted because a rank has ended"] * 3


def drive_with_a_rank_that_drafts_something_else(tp: TensorParallel) -> str:
    """Rank 1 changes one draft of its third proposal. Returns the error of this rank, and what
    rank 0 had emitted by then."""
    target, draft = Path(os.environ["TINY_TARGET"]), Path(os.environ["TINY_DRAFT"])
    runner = ModelRunner(load_models(config_of(target, draft), tp))
    drafting = runner.drafting
    assert drafting is not None
    propose, proposals = drafting.speculator.propose, iter(range(100))

    def disagree(inputs: Any) -> DraftOutput:
        output = propose(inputs)
        if next(proposals) == 2 and tp.rank == 1:
            output.tokens[0, -1] += 1
        return output

    drafting.speculator.propose = disagree  # type: ignore[method-assign]
    scheduler = Scheduler(
        slots=SlotPool(8, 2),
        blocks=BlockAllocator(runner.models.num_kv_blocks, 16),
        max_model_len=96,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
    )
    request = Request(0, [5, 6, 7], 3, 60, SamplingParams(max_tokens=57), seed=1)
    scheduler.add(request)
    executed = 0
    try:
        while True:
            plan = tp.broadcast_bytes(scheduler.schedule().to_bytes() if tp.rank == 0 else None)
            output = runner.execute(StepPlan.from_bytes(plan))
            executed += 1
            if tp.rank == 0:
                scheduler.update(output)
    except RankDivergenceError as error:
        return f"{executed} steps; {error.where}"


def test_ranks_that_disagree_end_the_run_before_a_token_of_the_step_is_emitted(
    tiny_target: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_TARGET", str(tiny_target))
    monkeypatch.setenv("TINY_DRAFT", str(tiny_draft))
    answers = run_ranks(2, drive_with_a_rank_that_drafts_something_else)
    expected = "3 steps; the proposal of step 2; ranks [1] differ from rank 0"
    assert answers == [expected, expected]
