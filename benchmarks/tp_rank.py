"""One rank of `tp_nccl.py`: loads each arm in turn, runs the same requests, measures itself."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from specreg.config import EngineConfig
from specreg.runtime.engine import Engine
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.step import StepOutput, StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.workers import rank_device
from specreg.sampling_params import SamplingParams

PARTS = ("target forward", "verification", "logits exchange", "drafting")

disable_progress_bar()


class Clock:
    """Milliseconds of parts of a step, by events that a CUDA graph may hold."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: dict[str, tuple[Any, Any]] = {}
        self.is_paused = False

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is launched inside; the last one of a name counts."""
        if self.is_paused:
            yield
            return
        if name not in self._marks:
            self._marks[name] = (self._mark(), self._mark())
        start, end = self._marks[name]
        self._stamp(start)
        yield
        self._stamp(end)

    def read(self) -> dict[str, float]:
        """Of the last step, which the host has waited for."""
        if self._is_cuda:
            return {name: start.elapsed_time(end) for name, (start, end) in self._marks.items()}
        return {name: 1e3 * (end[0] - start[0]) for name, (start, end) in self._marks.items()}

    def _mark(self) -> Any:
        return torch.cuda.Event(enable_timing=True, external=True) if self._is_cuda else [0.0]

    def _stamp(self, mark: Any) -> None:
        if self._is_cuda:
            mark.record()
        else:
            mark[0] = time.perf_counter()


class TimedGroup(TensorParallel):
    """The group; the collective of a replicated verification is timed."""

    clock: Clock

    def all_gather_columns(self, local: torch.Tensor) -> torch.Tensor:
        with self.clock.part("logits exchange"):
            return super().all_gather_columns(local)


class TimedRunner(ModelRunner):
    """A model runner that keeps the times of full decoding steps.

    Attributes:
        steps: a mapping from part to milliseconds, one a step.
    """

    def __init__(self, models: Any, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[dict[str, float]] = []
        if models.sharder is not None:
            models.sharder.exchange_logits = _timed(
                clock, "logits exchange", models.sharder.exchange_logits
            )
        super().__init__(models)

    def execute(self, plan: StepPlan) -> StepOutput:
        start = time.perf_counter()
        output = super().execute(plan)
        step = {"step": 1e3 * (time.perf_counter() - start), **self.clock.read()}
        is_full = len(plan.rows) == self.models.config.max_num_seqs
        if is_full and all(row.num_drafts > 0 for row in plan.rows):
            step["verification"] -= step["logits exchange"]
            self.steps.append(step)
        return output

    def _forward(self, *arguments: Any) -> Any:
        with self.clock.part("target forward"):
            return super()._forward(*arguments)

    def _verify(self, *arguments: Any) -> Any:
        with self.clock.part("verification"):
            return super()._verify(*arguments)

    def _propose(self, *arguments: Any) -> Any:
        with self.clock.part("drafting"):
            self.clock.is_paused = True  # A drafter may complete logits, too.
            proposal = super()._propose(*arguments)
            self.clock.is_paused = False
        return proposal


def _timed(clock: Clock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        with clock.part(name):
            return function(*arguments, **options)

    return run


class Peers:
    """What an engine asks of its group of ranks, when something else has started these."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp, self.size = tp, tp.size

    def begin_run(self) -> None:
        """The others wait for plans already."""

    def explaining_failures(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        """Whoever has started the group closes it."""


@dataclass(frozen=True)
class Workload:
    """Requests of a run: how many, how long, and how hot.

    Attributes:
        lengths: tokens that each request emits.
        prompt_length: tokens that it reads.
        temperature: of all.
    """

    lengths: tuple[int, ...]
    prompt_length: int
    temperature: float

    def first(self, num_tokens: int) -> Workload:
        """The same requests, cut short."""
        return replace(self, lengths=tuple(min(n, num_tokens) for n in self.lengths))

    def run(self, runner: ModelRunner, tp: TensorParallel) -> Any:
        """Outputs on rank 0; None on the others."""
        if tp.rank > 0:
            while payload := tp.broadcast_bytes(None):
                runner.execute(StepPlan.from_bytes(payload))
            return None
        vocab_size = runner.models.target.vocab_size
        shape = (len(self.lengths), self.prompt_length)
        prompts = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(3))
        params = [
            SamplingParams(
                max_tokens=length, temperature=self.temperature, seed=index, ignore_eos=True
            )
            for index, length in enumerate(self.lengths)
        ]
        peers: Any = Peers(tp)
        return Engine(runner.models.config, peers, runner).generate(prompts.tolist(), params)


def memory(device: torch.device) -> dict[str, int]:
    """Bytes of the caching allocator: allocated now, at the peak, and reserved."""
    if device.type != "cuda":
        return {"allocated": 0, "peak": 0, "reserved": 0}
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def forget(device: torch.device) -> None:
    """Give back all that earlier arms have allocated, and forget their peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_arm(
    config: EngineConfig,
    tp: TimedGroup,
    workload: Workload,
    uneven: Workload,
    warm_up: Workload,
) -> dict[str, Any]:
    """Build an arm, run it, take it down again."""
    forget(tp.device)
    before = memory(tp.device)["allocated"]
    started = time.perf_counter()
    tp.clock = Clock(tp.device)
    with contextlib.closing(TimedRunner(load_models(config, tp), tp.clock)) as runner:
        build_seconds = time.perf_counter() - started
        allocated = memory(tp.device)["allocated"] - before
        uneven_outputs = uneven.run(runner, tp)
        warm_up.run(runner, tp)
        runner.steps.clear()
        if tp.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        outputs = workload.run(runner, tp)
        after = memory(tp.device)
    plan = runner.models.drafting.plan
    result = {
        "build_seconds": round(build_seconds, 1),
        "run_seconds": round(time.perf_counter() - started - build_seconds, 1),
        "num_shards": plan.num_shards,
        "cache_bytes": plan.bytes_per_rank + plan.side_bytes_per_rank,
        "freed_bytes": plan.freed_bytes_per_rank,
        "allocated_bytes": allocated,
        "peak_bytes": after["peak"] - before,
        "reserved_bytes": after["reserved"],
        "num_full_steps": len(runner.steps),
        "ms": {part: median_of(runner.steps, part) for part in ("step", *PARTS)},
    }
    if outputs is not None:
        stats = outputs.stats
        result |= {
            "tokens": [output.token_ids for output in outputs],
            "uneven_tokens": [output.token_ids for output in uneven_outputs],
            "acceptance_length": round(stats.acceptance_length, 3),
            "tokens_per_second": round(stats.tokens_per_second, 1),
            "num_steps": stats.num_steps,
            "collectives": stats.num_collectives,
            "collective_bytes": stats.num_collective_bytes,
        }
    return result


def median_of(steps: list[dict[str, float]], part: str) -> float | None:
    """Milliseconds; None without a step."""
    return round(statistics.median(step[part] for step in steps), 3) if steps else None


def count_blocks(config: EngineConfig, tp: TimedGroup) -> dict[str, int]:
    """KV blocks of an arm whose pool takes what the budget leaves."""
    forget(tp.device)
    tp.clock = Clock(tp.device)
    models = load_models(config, tp)
    pool = models.kv_pool
    block_bytes = pool.block_bytes(pool.layers, pool.block_size, models.target.dtype)
    return {"num_kv_blocks": models.num_kv_blocks, "block_bytes": block_bytes}


def run_rank(
    rank: int,
    store: str,
    arms: dict[str, dict[str, Any]],
    budget: dict[str, Any],
    workload: Workload,
    uneven: Workload,
) -> dict[str, Any]:
    """Measure every arm, graphed and eager; `arms` are engine configurations by name.

    A rank that fails ends its process at once, or the others would wait for it.
    """
    try:
        return _run_rank(rank, store, arms, budget, workload, uneven)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _run_rank(
    rank: int,
    store: str,
    arms: dict[str, dict[str, Any]],
    budget: dict[str, Any],
    workload: Workload,
    uneven: Workload,
) -> dict[str, Any]:
    configs = {name: EngineConfig.parse(arm) for name, arm in arms.items()}
    size = next(iter(configs.values())).tensor_parallel_size
    device = rank_device(next(iter(configs.values())), rank)
    torch.set_num_threads(1)
    tp = TimedGroup(rank, size, store=dist.FileStore(store, size), device=device)
    results: dict[str, Any] = {}
    for name, is_eager in itertools.product(configs, (False, True)):
        config = configs[name].model_copy(update={"enforce_eager": is_eager})
        # The first arm compiles for every size of batch that the others will meet.
        warm_up = workload.first(4) if results else workload
        result = measure_arm(config, tp, workload, uneven, warm_up)
        results[f"{name}, eager" if is_eager else name] = result
        if rank == 0:
            took = {key: result[key] for key in ("build_seconds", "run_seconds", "ms")}
            print(f"{name}{', eager' if is_eager else ''}: {took}", flush=True)
    for name, arm in arms.items():
        config = EngineConfig.parse({**arm, **budget, "num_kv_blocks": None})
        results[name] |= count_blocks(config, tp)
    tp.close()
    return results
