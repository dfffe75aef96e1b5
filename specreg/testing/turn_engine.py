"""An engine whose ranks take turns in this process, and what it records."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from specreg.capabilities import Capabilities
from specreg.config import EngineConfig
from specreg.plan import DraftLogitsPlan
from specreg.registry import Registry
from specreg.runtime.engine import Engine
from specreg.runtime.loading import LoadedModels, load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.stats import RunStats
from specreg.runtime.step import StepPlan
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.workers import RankGroup
from specreg.speculator import Speculator, SpeculatorContext
from specreg.testing.calls import CALLS
from specreg.testing.observed import ObservedSpeculator, observed_spec
from specreg.testing.recorded_sampler import RecordedRejectionSampler
from specreg.testing.recording import RankLog
from specreg.testing.settings import Settings
from specreg.testing.turn_ranks import TurnGroup, TurnRank

__all__ = ["JoinedRanks", "Run", "TurnEngine"]

CLOSE = b"close"


@dataclass(frozen=True)
class Run:
    """One `generate` call.

    Attributes:
        tokens: emitted, a list a prompt.
        stats: counters of rank 0.
        logs: a record a rank.
        plan: final plan of rank 0; None without a speculator.
    """

    tokens: list[list[int]]
    stats: RunStats
    logs: list[RankLog]
    plan: DraftLogitsPlan | None


class TurnEngine:
    """An engine whose ranks are threads."""

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        capabilities: Capabilities,
    ) -> None:
        self._config, self._capabilities = config, capabilities
        self._observed: list[ObservedSpeculator] = []
        self._registry = self._observing(registry)
        size = config.tensor_parallel_size
        self.logs = [RankLog(rank) for rank in range(size)]
        self._group = TurnGroup(size)
        self._threads = [self._group.start(r, lambda r=r: self._serve(r)) for r in range(1, size)]  # type: ignore[misc]
        with self._as_rank_0():
            tp = TurnRank(0, self._group)
            self._tp = tp
            self.models = self._load(tp)

    def generate(self, call: str, settings: Settings) -> Run:
        """One call, with fresh records."""
        for observed in self._observed:
            observed.twist = settings.twist
        for rank in range(len(self.logs)):
            self.logs[rank] = RankLog(rank)
        prompts, params = CALLS[call]
        config = self._config.model_copy(update={"max_num_batched_tokens": settings.chunk})
        with self._as_rank_0():
            runner = ModelRunner(replace(self.models, config=config))
            engine = Engine(config, cast(RankGroup, JoinedRanks(self._tp)), runner)
            outputs = engine.generate(prompts, params)
        tokens = [output.token_ids for output in outputs]
        return Run(tokens, outputs.stats, list(self.logs), engine.plan)

    def close(self) -> None:
        """End the other ranks."""
        with self._group.turn():
            if self._group.failure is None and self._threads:
                self._tp.broadcast_bytes(CLOSE)
        for thread in self._threads:
            thread.join()

    @contextmanager
    def _as_rank_0(self) -> Iterator[None]:
        """The turn; an error ends every rank, and the one that came first is raised."""
        with self._group.turn(), _quiet():
            try:
                yield
            except BaseException as error:
                self._group.fail(error)
                assert self._group.failure is not None
                raise self._group.failure from None

    def _serve(self, rank: int) -> None:
        tp = TurnRank(rank, self._group)
        models = self._load(tp)
        runner = ModelRunner(models)
        while (payload := tp.broadcast_bytes(None)) != CLOSE:
            if payload:
                runner.execute(StepPlan.from_bytes(payload))
            else:
                runner = ModelRunner(models)  # Rank 0 begins each call with a new one, too.

    def _load(self, tp: TensorParallel) -> LoadedModels:
        torch.set_num_threads(1)
        models = load_models(self._config, tp, registry=self._registry)
        if models.drafting is None:
            return models
        observed = cast(ObservedSpeculator, models.drafting.speculator)
        observed.kv_pool = models.kv_pool
        observed.num_target_layers = len(models.target.kv_specs)
        recorded = RecordedRejectionSampler(models.rejection_sampler, self._log_of(tp.rank))
        return replace(models, rejection_sampler=cast(Any, recorded))

    def _log_of(self, rank: int) -> Any:
        return lambda: self.logs[rank]

    def _observing(self, registry: Registry) -> Registry:
        """The same plugins with their speculators under observation."""

        def observe(inner: Speculator, context: SpeculatorContext) -> ObservedSpeculator:
            observed = ObservedSpeculator(
                inner,
                self._capabilities,
                self._log_of(_current_rank()),
                context.config.max_num_seqs,
            )
            self._observed.append(observed)
            return observed

        plugins = tuple(
            replace(
                plugin, speculators=tuple(observed_spec(s, observe) for s in plugin.speculators)
            )
            for plugin in registry.plugins
        )
        return replace(registry, plugins=plugins)


class JoinedRanks:
    """What an `Engine` asks of its `RankGroup`, for ranks that are there already."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp = tp
        self.process_ids: list[int] = []

    def begin_run(self) -> None:
        """The other ranks wait for plans at all times."""

    def explaining_failures(self) -> Any:
        return nullcontext()

    def close(self) -> None:
        """The engine's owner ends the ranks."""


def _current_rank() -> int:
    name = threading.current_thread().name
    return int(name.removeprefix("rank ")) if name.startswith("rank ") else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no lines about plans; one compute thread."""
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    was_enabled = is_progress_bar_enabled()
    logger, num_threads = logging.getLogger("specreg"), torch.get_num_threads()
    was_disabled, logger.disabled = logger.disabled, True
    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        logger.disabled = was_disabled
        if was_enabled:
            enable_progress_bar()  # type: ignore[no-untyped-call]
