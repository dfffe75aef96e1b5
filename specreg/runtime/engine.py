"""The embedded engine, as its user sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType

from specreg.config import EngineConfig
from specreg.policy import DraftLogitsPlan
from specreg.runtime.admission import Admitter
from specreg.runtime.core import EngineCore
from specreg.runtime.loading import load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.outputs import GenerateOutputs
from specreg.runtime.stream import RequestStream
from specreg.runtime.workers import RankGroup
from specreg.sampling_params import SamplingParams

__all__ = ["Engine", "GenerateOutputs"]


class Engine:
    """A small engine on one machine: a process a rank, rank 0 in the caller's own.

    Build it with `from_config`; use it as a context manager, or call `close`.

    Attributes:
        config: of the run.
        models: what this process, rank 0, has loaded.
    """

    def __init__(self, config: EngineConfig, group: RankGroup, runner: ModelRunner) -> None:
        self.config = config
        self.models = runner.models
        self._group = group
        self._core = EngineCore(group, runner)
        self._admitter = Admitter(runner.models, random.Random(config.seed))

    @property
    def plan(self) -> DraftLogitsPlan | None:
        """The final plan of the draft-logits cache; None without a speculator."""
        return self.models.drafting.plan if self.models.drafting is not None else None

    @property
    def process_ids(self) -> list[int]:
        """Processes of ranks 1 and up, in order."""
        return self._group.process_ids

    @property
    def num_free_slots(self) -> int:
        """Requests that could join those that run, as far as slots go."""
        return len(self._core.scheduler.slots)

    @property
    def num_free_kv_blocks(self) -> int:
        """KV blocks that no request holds."""
        return self._core.scheduler.blocks.num_free

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, progress: Callable[[str], None] | None = None
    ) -> Engine:
        """Load the models on every rank, settle the plan, allocate.

        Args:
            config: of the run.
            progress: called with a line at the start of each stage of loading.

        Raises:
            SpecregError: the configuration, a checkpoint or the policy forbids the run.
            RankFailedError: another rank failed while it loaded.
        """
        group = RankGroup(config)
        try:
            with group.explaining_failures():
                return cls(config, group, ModelRunner(load_models(config, group.tp, progress)))
        except BaseException:
            group.close()
            raise

    def close(self) -> None:
        """End the other ranks. Safe to call twice."""
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stream(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> RequestStream:
        """Run the prompts, batched continuously, and give what they emit as it comes.

        Args:
            prompts: texts, or token ids where the caller tokenises.
            sampling_params: one for all prompts, or one a prompt.

        Returns:
            An iterator of deltas, by which single requests can be cancelled. One stream may be open
            at a time.

        Raises:
            AdmissionError: a prompt or its parameters cannot be served; nothing has run.
            ConfigError: the engine is closed, or another stream is open.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        requests = self._admitter.admit(prompts, params)
        return RequestStream(self._core, requests, prompts)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> GenerateOutputs:
        """Run the prompts to their ends, batched continuously.

        Args:
            prompts: texts, or token ids where the caller tokenises.
            sampling_params: one for all prompts, or one a prompt.
            on_finish: called with a prompt's index when its request has ended.

        Raises:
            AdmissionError: a prompt or its parameters cannot be served; nothing has run.
            ConfigError: the engine is closed, or a stream is open.
            RankDivergenceError: the ranks' proposals differ.
            RankFailedError: another rank died; its error is named.
        """
        with self.stream(prompts, sampling_params) as stream:
            for index in stream.finished():
                if on_finish is not None:
                    on_finish(index)
            return stream.outputs()
