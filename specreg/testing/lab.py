"""Where a subject is run: engines whose ranks take turns in this process, each run done once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from specreg.capabilities import Capabilities, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.kernels.rejection_sample.op import METHODS
from specreg.model_config import read_model_config
from specreg.plan import DraftLogitsPlan
from specreg.registry import Registry, Selection
from specreg.runtime.engine import Engine
from specreg.runtime.loading import LoadedModels, load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.stats import RunStats
from specreg.runtime.step import StepPlan
from specreg.runtime.target import Target
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.runtime.workers import RankGroup
from specreg.speculator import Speculator, SpeculatorContext
from specreg.testing.calls import CALLS
from specreg.testing.observed import ObservedSpeculator, Twist, observed_spec
from specreg.testing.rank_pool import RankPool
from specreg.testing.recorded_sampler import RecordedRejectionSampler
from specreg.testing.recording import RankLog
from specreg.testing.subject import Subject
from specreg.testing.turn_ranks import TurnGroup, TurnRank

__all__ = ["Lab", "Run", "Settings", "engine_config"]

MAX_MODEL_LEN = 64
BLOCK_SIZE = 8
BLOCKS_PER_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE
CLOSE = b"close"
# Approximates no distribution of the target: it accepts at given rates.
NOT_LOSSLESS = "synthetic"


@dataclass(frozen=True)
class Settings:
    """How an engine is set up.

    Attributes:
        tp: ranks.
        max_num_seqs: slots; the default of `Lab.slots` divides by no number of ranks above 1.
        sharding, layout, rejection: the config keys `draft_logits_sharding`,
            `draft_logits_layout` and `rejection_sample_method`.
        drafts: `draft_sample_method`; None takes what shows most of the speculator.
        is_baseline: without the speculator.
        chunk: tokens a step.
        num_kv_blocks: None is enough for every slot.
        twist: see `Twist`.
    """

    tp: int = 1
    max_num_seqs: int = 5
    sharding: str = "auto"
    layout: str = "auto"
    rejection: str = "standard"
    drafts: str | None = None
    is_baseline: bool = False
    chunk: int = 128
    num_kv_blocks: int | None = None
    twist: Twist = Twist.NONE


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


def engine_config(subject: Subject, settings: Settings, drafts: str) -> EngineConfig:
    """The configuration of a run."""
    config: dict[str, Any] = {
        "target": subject.target,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.chunk,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": settings.num_kv_blocks or BLOCKS_PER_REQUEST * settings.max_num_seqs,
        "tensor_parallel_size": settings.tp,
        "enable_batch_sharded_sampling": settings.tp > 1,
        "draft_logits_sharding": settings.sharding,
    }
    if not settings.is_baseline:
        config["draft_logits_layout"] = settings.layout
        config["speculative"] = {
            **subject.speculative,
            "draft_sample_method": settings.drafts or drafts,
            "rejection_sample_method": settings.rejection,
        }
    return EngineConfig.parse(config)


class Lab:
    """Runs a subject, each combination of settings and call at most once.

    Attributes:
        subject: what is run.
        capabilities: what its speculator declares.
        selection: of its speculator.
        tps: numbers of ranks to prove it for.
        notes: what checks keep for each other.
        pool: rank processes; its own, started when they are needed, unless one was given.
        max_model_len: of every engine.
        blocks_per_request: KV blocks of a request of that length.
    """

    max_model_len = MAX_MODEL_LEN
    blocks_per_request = BLOCKS_PER_REQUEST

    def __init__(
        self,
        subject: Subject,
        tps: tuple[int, ...] = (1, 2, 3, 4),
        pool: RankPool | None = None,
    ) -> None:
        self.subject = subject
        self.tps = tps
        self.registry = subject.registry()
        model = subject.speculative.get("model")
        config = engine_config(subject, Settings(), "greedy").speculative
        assert config is not None
        self.selection: Selection = self.registry.select(config, read_model_config(model))
        self.capabilities: Capabilities = self.selection.spec.capabilities_for(
            self.selection.draft_config
        )
        self.pool = pool or RankPool(max(tps))
        self._owns_pool = pool is None
        self._engines: dict[Settings, _TurnEngine | Exception] = {}
        self.notes: dict[str, Any] = {}
        self._runs: dict[tuple[Settings, str], Run | BaseException] = {}

    @property
    def drafts(self) -> str:
        """`draft_sample_method` that shows most of the speculator."""
        return "probabilistic" if self.capabilities.supports_probabilistic else "greedy"

    @property
    def has_cache(self) -> bool:
        """Whether it ever keeps draft logits."""
        return self.capabilities.supports_probabilistic

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that it declares and has the facts for; `"auto"` without a cache."""
        if not self.has_cache:
            return ("auto",)
        declared = self.capabilities
        return tuple(
            layout.value
            for layout in DraftLogitsLayout
            if layout in declared.layouts
            and (layout is not DraftLogitsLayout.TOP_K or declared.num_candidates is not None)
            and (layout is not DraftLogitsLayout.DRAFT_VOCAB or declared.draft_vocab_size)
        )

    @property
    def rejection_methods(self) -> tuple[str, ...]:
        """Lossless ways to judge its drafts."""
        methods = tuple(method for method in METHODS if method != NOT_LOSSLESS)
        return methods if self.has_cache else methods[:1]

    def slots(self, tp: int) -> int:
        """A number of slots that `tp` does not divide, except by 1."""
        return {1: 3, 2: 5, 3: 4}.get(tp, tp + 2 if tp > 2 else tp)

    def plain(self, tp: int = 1, **changes: Any) -> Settings:
        """The settings of most runs: the first layout and the first rejection method."""
        plain = Settings(
            tp=tp, max_num_seqs=self.slots(tp), layout=self.layouts[0], drafts=self.drafts
        )
        return replace(plain, **changes)

    def config(self, settings: Settings) -> EngineConfig:
        """The configuration that settings stand for."""
        return engine_config(self.subject, settings, self.drafts)

    def target(self, settings: Settings) -> Target:
        """The target of rank 0."""
        return self._engine(settings).models.target

    def run(self, settings: Settings, call: str) -> Run:
        """Make a call of `CALLS`; an engine that failed fails again.

        Raises:
            Exception: whatever the first rank that failed raised.
        """
        key = (settings, call)
        if key not in self._runs:
            loaded = _loaded(settings)
            try:
                engine = self._engine(settings)
                if key not in self._runs:
                    self._runs[key] = engine.generate(call, settings)
            except Exception as error:
                self._runs[key] = error
                if isinstance(self._engines.get(loaded), _TurnEngine):
                    del self._engines[loaded]  # What it has left behind is nobody else's fault.
        found = self._runs[key]
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        for engine in self._engines.values():
            if isinstance(engine, _TurnEngine):
                engine.close()
        self._engines = {}
        if self._owns_pool:
            self.pool.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine(self, settings: Settings) -> _TurnEngine:
        """The engine for these settings, loaded once; its very first call is "alone"."""
        loaded = _loaded(settings)
        if loaded not in self._engines:
            try:
                engine = _TurnEngine(self.config(loaded), self.registry, self.capabilities)
                self._engines[loaded] = engine
                self._runs[loaded, "alone"] = engine.generate("alone", loaded)
            except Exception as error:
                self._engines[loaded] = error
        found = self._engines[loaded]
        if isinstance(found, BaseException):
            raise found
        return found


def _loaded(settings: Settings) -> Settings:
    """What an engine is loaded for; the rest can change from call to call."""
    return replace(settings, chunk=Settings.chunk, twist=Settings.twist)


class _TurnEngine:
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
            engine = Engine(config, cast(RankGroup, _Group(self._tp)), runner)
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


class _Group:
    """What an `Engine` asks of its `RankGroup`, for ranks that are threads."""

    def __init__(self, tp: TurnRank) -> None:
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
