"""Ranks on several GPUs, over NCCL: the behaviour that gloo has, with CUDA graphs and without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

pytest.importorskip("transformers")

from specreg.config import EngineConfig
from specreg.errors import RankDivergenceError, RankFailedError
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.cuda_graphs import CapturedFunction, GraphPool, GraphSizes
from specreg.runtime.engine import Engine
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.request import Request
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.sampling_params import SamplingParams
from specreg.testing import perturbed_copy
from specreg.testing.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA or ROCm devices"),
]

K = 3
SECONDS_TO_NOTICE = 20
PROMPTS = ["hello world", "a", "The quick brown fox", "(1, 2, 3)", "x = y"]
# Slots go to the ranks in turn: rank 1 owns the second and the fourth, which end first.
UNEVEN = [
    SamplingParams(max_tokens=length, temperature=temperature, seed=length, ignore_eos=True)
    for length, temperature in [(30, 0.8), (3, 0.0), (27, 1.3), (4, 1.0), (40, 0.5)]
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a drafter that is sometimes right; the vocabulary is a prime."""
    target = save_tiny_model("llama", tmp_path_factory.mktemp("target"), vocab_size=32_771)
    return target, perturbed_copy(target, tmp_path_factory.mktemp("draft"))


def config_of(models: tuple[Path, Path], **extra: Any) -> EngineConfig:
    target, draft = models
    return EngineConfig.parse(
        {
            "target": str(target),
            "device": "cuda",
            "max_model_len": 96,
            "num_kv_blocks": 400,
            "tensor_parallel_size": 2,
            "enable_batch_sharded_sampling": True,
            "speculative": {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": K,
                "draft_sample_method": "probabilistic",
            },
            **extra,
        }
    )


ARMS: dict[str, dict[str, Any]] = {
    "base": {"enable_batch_sharded_sampling": False},
    "replicated": {"draft_logits_sharding": "off"},
    "sharded": {"draft_logits_sharding": "require"},
}


def test_arms_and_graphs_change_no_token_and_no_collective_with_uneven_and_idle_owners(
    models: tuple[Path, Path],
) -> None:
    outputs = {}
    for arm, is_eager in [(arm, is_eager) for arm in ARMS for is_eager in (False, True)]:
        with Engine.from_config(config_of(models, enforce_eager=is_eager, **ARMS[arm])) as engine:
            runner = engine._core._runner
            captured = runner.proposer.draft.captured_sizes  # type: ignore[union-attr]
            decided = runner.padded_verifier.decide.captured_sizes  # type: ignore[union-attr]
            owned = (1, 2, 4) if arm != "base" else (1, 2, 4, 8)
            assert (captured, decided) == (((), ()) if is_eager else ((1, 2, 4, 8), owned))
            first, again = (engine.generate(PROMPTS, UNEVEN) for _ in range(2))
        tokens = [output.token_ids for output in first]
        assert [len(row) for row in tokens] == [30, 3, 27, 4, 40]
        assert [output.token_ids for output in again] == tokens
        stats = first.stats
        outputs[arm, is_eager] = tokens, stats.num_collectives, stats.num_collective_bytes
        assert stats.acceptance_length > 1.2
    for arm in ARMS:
        assert outputs[arm, True] == outputs[arm, False]
    assert outputs["sharded", False] == outputs["replicated", False]


def test_cut_offs_of_one_owner_run_beside_the_graphs_of_the_other(
    models: tuple[Path, Path],
) -> None:
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=i, top_k=5 * (i % 2), ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    results = []
    for is_eager in (True, False):
        with Engine.from_config(config_of(models, enforce_eager=is_eager)) as engine:
            results.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    assert results[0] == results[1]


def test_sharding_frees_what_the_plan_says(models: tuple[Path, Path]) -> None:
    results = {}
    for sharding in ("off", "auto"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        config = config_of(models, draft_logits_sharding=sharding, max_num_seqs=64)
        with Engine.from_config(config) as engine:
            outputs = [output.token_ids for output in engine.generate(PROMPTS, UNEVEN)]
            plan = engine.plan
            peak = torch.cuda.max_memory_allocated()
        assert plan is not None
        results[sharding] = outputs, peak, plan.bytes_per_rank + plan.side_bytes_per_rank
        del engine
    (off_tokens, off_peak, off_planned), (tokens, peak, planned) = results.values()
    assert tokens == off_tokens
    assert off_planned - planned > 2**23
    assert abs(off_peak - peak - (off_planned - planned)) <= 2**21


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_killed_rank_ends_the_run_in_seconds_and_is_named(
    models: tuple[Path, Path], is_eager: bool
) -> None:
    config = config_of(models, enforce_eager=is_eager)
    with Engine.from_config(config) as engine:
        killed_at = 0.0

        def kill(_: int) -> None:
            nonlocal killed_at
            os.kill(engine.process_ids[-1], signal.SIGKILL)
            killed_at = killed_at or time.monotonic()

        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 60)]
        with pytest.raises(RankFailedError, match="killed by signal 9") as error:
            engine.generate(["abc", "hello world"], params, on_finish=kill)
        assert error.value.where == "rank 1 of 2"
    seconds = time.monotonic() - killed_at
    print(f"noticed and closed in {seconds:.2f} s")
    assert seconds < SECONDS_TO_NOTICE
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # the device serves this process still
    with Engine.from_config(config) as engine:
        assert len(engine.generate(["abc"], params[:1])[0].token_ids) == 2


DOOMED = """
import os, signal, sys
from specreg.config import EngineConfig
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
engine = Engine.from_config(EngineConfig.model_validate_json(sys.argv[1]))
print(engine.process_ids[0], flush=True)
params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 60)]
end = lambda _: os.kill(os.getpid(), signal.SIGKILL)
engine.generate(["abc", "hello world"], params, on_finish=end)
"""


def test_no_rank_outlives_the_first(models: tuple[Path, Path]) -> None:
    config = config_of(models).model_dump_json()
    first = subprocess.Popen(
        [sys.executable, "-c", DOOMED, config], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    worker = int(first.stdout.readline())
    assert first.wait(60) == -signal.SIGKILL
    ended_by = time.monotonic() + SECONDS_TO_NOTICE
    while _is_alive(worker) and time.monotonic() < ended_by:
        time.sleep(0.05)
    assert not _is_alive(worker)


def _is_alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def drive_with_a_rank_that_drafts_something_else(tp: TensorParallel) -> str:
    """Rank 1 changes one draft of its third proposal; returns the error of this rank."""
    models = Path(os.environ["TP_TARGET"]), Path(os.environ["TP_DRAFT"])
    runner = ModelRunner(load_models(config_of(models), tp))
    propose, proposals = runner.proposer, iter(range(100))

    def disagree(inputs: Any) -> torch.Tensor:
        drafts = propose(inputs)  # type: ignore[misc]
        if next(proposals) == 2 and tp.rank == 1:
            drafts[0, -1] += 1
        return drafts

    runner.proposer = disagree  # type: ignore[assignment]
    scheduler = Scheduler(
        slots=SlotPool(8, 2),
        blocks=BlockAllocator(runner.models.num_kv_blocks, 16),
        max_model_len=96,
        max_num_batched_tokens=64,
        num_speculative_tokens=K,
    )
    scheduler.add(Request(0, [5, 6, 7], 3, 60, SamplingParams(max_tokens=57), seed=1))
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
    finally:
        runner.proposer = propose
        runner.close()


def test_ranks_that_disagree_end_the_run_before_a_token_of_the_step_is_emitted(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TP_TARGET", str(models[0]))
    monkeypatch.setenv("TP_DRAFT", str(models[1]))
    answers = run_ranks(2, drive_with_a_rank_that_drafts_something_else, "cuda")
    expected = "3 steps; the proposal of step 2; ranks [1] differ from rank 0"
    assert answers == [expected, expected]


def replay_collectives(tp: TensorParallel) -> dict[str, Any]:
    """Gathers of several columns in one graph, as a drafter without a head of its own has them."""
    buffer = torch.zeros(8, 5, dtype=torch.bfloat16, device=tp.device)

    def gather_twice(size: int) -> list[torch.Tensor]:
        once = tp.all_gather_columns(buffer[:size])
        return [once, tp.all_gather_columns(once.float() + tp.rank)]

    pool = GraphPool(torch.cuda.graph_pool_handle(), (tp.counts, tp.num_bytes))
    captured = CapturedFunction("gather", gather_twice, GraphSizes((4, 8), True), pool)
    is_equal = True
    for number, size in enumerate([8, 4, 8, 8, 4, 3]):
        buffer.copy_(torch.arange(40.0).view(8, 5) + 100 * tp.rank + number)
        got = captured(size)
        counted = dict(tp.counts), dict(tp.num_bytes)
        is_equal &= all(map(torch.equal, got, gather_twice(size)))
        tp.counts["all_gather"] -= 2
        tp.num_bytes.clear()
        tp.num_bytes.update(counted[1])
    captured.release()
    return {
        "is_equal": is_equal,
        "captured": captured.captured_sizes,
        "counts": dict(tp.counts),
        "bytes": dict(tp.num_bytes),
        "last": got[0].float().tolist(),
    }


def test_collectives_inside_a_graph_equal_eager_ones_and_are_counted() -> None:
    first, second = run_ranks(2, replay_collectives, "cuda")
    assert first == second
    assert first["is_equal"]
    assert first["counts"] == {"all_gather": 12}
    assert first["bytes"] == {"all_gather": sum([8, 4, 8, 8, 4, 3]) * (2 * 5 * 2 + 2 * 10 * 4)}
    row = [float(column + 5) for column in range(5)]
    assert first["last"][0] == [*row, *(value + 100 for value in row)]
