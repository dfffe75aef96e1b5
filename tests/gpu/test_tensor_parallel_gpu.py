"""Ranks on several GPUs, over NCCL: the behaviour that gloo has, with CUDA graphs and without."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import generate, run_ranks

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
ALLOCATOR_BLOCK = 2**21
PROMPTS = ["hello world", "a", "The quick brown fox", "(1, 2, 3)", "x = y"]
# Slots go to the ranks in turn: rank 1 owns the second and the fourth, which end first.
UNEVEN = [
    SamplingParams(max_tokens=length, temperature=temperature, seed=length, ignore_eos=True)
    for length, temperature in [(30, 0.8), (3, 0.0), (27, 1.3), (4, 1.0), (40, 0.5)]
]
# Cut-offs keep the second rank's requests out of its graphs, and the first's in theirs.
CUT_OFF = [
    SamplingParams(max_tokens=20, temperature=1.0, seed=i, top_k=5 * (i % 2), ignore_eos=True)
    for i in range(len(PROMPTS))
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
SIZES = (1, 2, 4, 8, 64)


def measure_arm(tp: TensorParallel, **config: Any) -> dict[str, Any]:
    """Tokens, collectives, graphs and bytes of one arm, seen by this rank."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    models = Path(os.environ["TP_TARGET"]), Path(os.environ["TP_DRAFT"])
    config |= {"max_num_seqs": 64, "cuda_graph_sizes": SIZES}
    with contextlib.closing(ModelRunner(load_models(config_of(models, **config), tp))) as runner:
        assert runner.proposer is not None
        assert runner.padded_verifier is not None
        outputs = [generate(runner, PROMPTS, params) for params in (UNEVEN, UNEVEN, CUT_OFF)]
        plan = runner.models.drafting.plan  # type: ignore[union-attr]
        return {
            "draft_sizes": runner.proposer.draft.captured_sizes,
            "verification_sizes": runner.padded_verifier.decide.captured_sizes,
            "tokens": [[request.token_ids for request in run] for run in outputs if run],
            "collectives": [
                (run.stats.num_collectives, run.stats.num_collective_bytes)
                for run in outputs
                if run
            ],
            "acceptance_length": outputs[0].stats.acceptance_length if outputs[0] else None,
            "peak": torch.cuda.max_memory_allocated(),
            "planned": plan.bytes_per_rank + plan.side_bytes_per_rank,
        }


def measure_arms(tp: TensorParallel) -> dict[tuple[str, bool], dict[str, Any]]:
    """By arm, and whether it is eager."""
    return {
        (arm, is_eager): measure_arm(tp, enforce_eager=is_eager, **ARMS[arm])
        for arm in ARMS
        for is_eager in (False, True)
    }


@pytest.fixture(scope="module")
def arms(models: tuple[Path, Path]) -> list[dict[tuple[str, bool], dict[str, Any]]]:
    """What each rank measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_TARGET", str(models[0]))
        patch.setenv("TP_DRAFT", str(models[1]))
        return run_ranks(2, measure_arms, "cuda")


def test_every_size_is_captured_for_drafting_and_for_as_many_requests_as_a_rank_verifies(
    arms: Any,
) -> None:
    for rank in arms:
        for (arm, is_eager), result in rank.items():
            owned = SIZES if arm == "base" else (1, 2, 4, 8, 32)
            assert result["draft_sizes"] == (() if is_eager else SIZES)
            assert result["verification_sizes"] == (() if is_eager else owned)


def test_graphs_change_no_token_and_no_collective_with_uneven_and_idle_owners(arms: Any) -> None:
    for arm in ARMS:
        graphed, eager = arms[0][arm, False], arms[0][arm, True]
        assert graphed["tokens"] == eager["tokens"]
        assert graphed["collectives"] == eager["collectives"]
        assert [len(row) for row in graphed["tokens"][0]] == [30, 3, 27, 4, 40]
        assert graphed["tokens"][0] == graphed["tokens"][1]
        assert graphed["acceptance_length"] > 1.2


def test_sharding_the_cache_changes_no_token_and_no_collective(arms: Any) -> None:
    for is_eager in (False, True):
        replicated, sharded = (arms[0][arm, is_eager] for arm in ("replicated", "sharded"))
        assert sharded["tokens"] == replicated["tokens"]
        assert sharded["collectives"] == replicated["collectives"]


def test_sharding_frees_on_every_rank_what_the_plan_says(arms: Any) -> None:
    for rank in arms:
        for is_eager in (False, True):
            replicated, sharded = (rank[arm, is_eager] for arm in ("replicated", "sharded"))
            freed = replicated["planned"] - sharded["planned"]
            assert freed > 2**23
            assert abs(replicated["peak"] - sharded["peak"] - freed) <= ALLOCATOR_BLOCK


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("delay", [None, 0.0, 1.0])
def test_a_killed_rank_ends_the_run_in_seconds_and_is_named(
    models: tuple[Path, Path], is_eager: bool, delay: float | None
) -> None:
    """It dies between two steps (None), or while rank 0 runs one: either at once, so that a kernel
    waits for it, or long enough before the first collective to be noticed by then."""
    config = config_of(models, enforce_eager=is_eager)
    killed_at = []
    with Engine.from_config(config) as engine:
        runner = engine._core._runner
        run = runner._run

        def kill(_: int = 0) -> None:
            killed_at.append(time.monotonic())
            os.kill(engine.process_ids[-1], signal.SIGKILL)

        def run_while_it_dies(*arguments: Any) -> Any:
            if not killed_at:
                kill()
                time.sleep(delay or 0.0)
            return run(*arguments)

        def on_finish(_: int) -> None:
            if delay is None:
                kill()
            else:
                runner._run = run_while_it_dies  # type: ignore[method-assign]

        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 60)]
        with pytest.raises(RankFailedError, match="killed by signal 9") as error:
            engine.generate(["abc", "hello world"], params, on_finish=on_finish)
        assert error.value.where == "rank 1 of 2"
    seconds = time.monotonic() - killed_at[0]
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
print("worker", engine.process_ids[0], flush=True)
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
    said = next(line for line in first.stdout if line.startswith("worker"))  # NCCL prints, too
    worker = int(said.split()[1])
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
