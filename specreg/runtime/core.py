"""Steps of all ranks, driven by rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specreg.errors import ConfigError, InternalError
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.loading import LoadedModels
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.request import Request
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.stats import RunStats
from specreg.runtime.workers import RankGroup

__all__ = ["EngineCore"]


class EngineCore:
    """Schedules, broadcasts, executes and updates; one run at a time.

    Args:
        group: rank 0 and the others.
        runner: of rank 0.

    Attributes:
        scheduler: holds the live requests.
        is_running: between `begin_run` and `end_run`, or an error.
    """

    def __init__(self, group: RankGroup, runner: ModelRunner) -> None:
        self.scheduler = _scheduler(runner.models)
        self.is_running = False
        self._group = group
        self._runner = runner
        self._is_closed = False
        self._num_preemptions_before = 0

    def close(self) -> None:
        """End the other ranks. Safe to call twice."""
        self._is_closed, self.is_running = True, False
        self._runner.close()
        self._group.close()

    def begin_run(self) -> RunStats:
        """Wake the other ranks; returns the counters of the run.

        Raises:
            ConfigError: the engine is closed, or a run is under way.
        """
        if self._is_closed or self.is_running:
            closed = "an engine that was closed, by `close` or by an error in an earlier run"
            raise ConfigError(
                "the engine cannot generate",
                where="Engine.generate, Engine.stream",
                got=closed if self._is_closed else "a stream that is still open",
                fix="build a new engine with Engine.from_config"
                if self._is_closed
                else "read the stream to its end or close it first",
            )
        models = self._runner.models
        plan = models.drafting.plan if models.drafting is not None else None
        with self._ending_on_error():
            self._group.begin_run()
        self.is_running = True
        self._group.tp.clear_counts()
        self._runner.clear_counts()
        self._num_preemptions_before = self.scheduler.num_preemptions
        return RunStats(
            num_accepted_by_position=[0] * models.num_speculative_tokens,
            draft_logits_bytes_per_rank=plan.bytes_per_rank if plan else 0,
            num_kv_blocks=models.num_kv_blocks,
        )

    def step(self, stats: RunStats) -> list[Request]:
        """One step on every rank, counted; returns the requests that it took further.

        Raises:
            RankDivergenceError: the ranks' proposals differ.
            RankFailedError: another rank died; its error is named.
        """
        with self._ending_on_error():
            plan = self.scheduler.schedule()
            if not plan.rows and not plan.released:
                raise InternalError(
                    "a step was planned that does nothing",
                    where=f"Scheduler.schedule, step {plan.step}",
                    got="requests that wait, and no row in the batch; allowed: at least one",
                    fix="report this with the engine's configuration",
                )
            self._group.tp.broadcast_bytes(plan.to_bytes())
            output = self._runner.execute(plan)
            stats.count(plan, output)
            stats.num_preemptions = self.scheduler.num_preemptions - self._num_preemptions_before
            return self.scheduler.update(output)

    def end_run(self, stats: RunStats) -> None:
        """Send the other ranks back to waiting, and complete the counters."""
        with self._ending_on_error():
            self._group.tp.broadcast_bytes(b"")
        self.is_running = False
        stats.num_draft_nans = self._runner.num_draft_nans
        stats.num_collectives = dict(self._group.tp.counts)
        stats.num_collective_bytes = dict(self._group.tp.num_bytes)

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            with self._group.explaining_failures():
                yield
        except BaseException:
            self.close()
            raise


def _scheduler(models: LoadedModels) -> Scheduler:
    config = models.config
    return Scheduler(
        slots=SlotPool(config.max_num_seqs, models.num_owners),
        blocks=BlockAllocator(models.num_kv_blocks, config.block_size),
        max_model_len=models.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=models.num_speculative_tokens,
        prefill_lookahead=models.needs.prefill_lookahead,
    )
