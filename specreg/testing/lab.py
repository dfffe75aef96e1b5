"""Where a subject is run: engines whose ranks take turns in this process, each run done once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specreg.capabilities import Capabilities, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.kernels.rejection_sample.op import METHODS
from specreg.model_config import read_model_config
from specreg.registry import Selection
from specreg.runtime.target import Target
from specreg.testing.kit_watermark import with_watermarker
from specreg.testing.rank_pool import RankPool
from specreg.testing.rounding import Rounding, rounding_of
from specreg.testing.settings import BLOCKS_PER_REQUEST, MAX_MODEL_LEN, Settings, engine_config
from specreg.testing.subject import Subject
from specreg.testing.turn_engine import Run, TurnEngine

__all__ = ["Lab"]

# Approximates no distribution of the target: it accepts at given rates.
NOT_LOSSLESS = "synthetic"


class Lab:
    """Runs a subject, each combination of settings and call at most once.

    Attributes:
        subject: what is run.
        capabilities: what its speculator declares.
        selection: of its speculator.
        tps: numbers of ranks to prove it for.
        rounding: what results of other shapes may differ in.
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
        self.rounding: Rounding = rounding_of(subject.dtype)
        self.registry = with_watermarker(subject.registry())
        model = subject.speculative.get("model")
        config = engine_config(subject, Settings(), "greedy").speculative
        assert config is not None
        self.selection: Selection = self.registry.select(
            config, read_model_config(model), read_model_config(subject.target)
        )
        self.capabilities: Capabilities = self.selection.capabilities
        self.pool = pool or RankPool(max(tps))
        self._owns_pool = pool is None
        self._engines: dict[Settings, TurnEngine | Exception] = {}
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
                if isinstance(self._engines.get(loaded), TurnEngine):
                    del self._engines[loaded]  # What it has left behind is nobody else's fault.
        found = self._runs[key]
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the engines. Safe to call twice."""
        for engine in self._engines.values():
            if isinstance(engine, TurnEngine):
                engine.close()
        self._engines = {}
        if self._owns_pool:
            self.pool.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine(self, settings: Settings) -> TurnEngine:
        """The engine for these settings, loaded once; a plain one's very first call is "alone"."""
        loaded = _loaded(settings)
        if loaded not in self._engines:
            try:
                engine = TurnEngine(self.config(loaded), self.registry, self.capabilities)
                self._engines[loaded] = engine
                if loaded == self.plain(loaded.tp):
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
