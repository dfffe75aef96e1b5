"""The embedded engine, as its user sees it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import overload

from specreg.config import EngineConfig
from specreg.errors import AdmissionError, ConfigError
from specreg.policy import DraftLogitsPlan
from specreg.runtime.blocks import BlockAllocator
from specreg.runtime.loading import LoadedModels, load_models
from specreg.runtime.model_runner import ModelRunner
from specreg.runtime.request import Request, RequestOutput
from specreg.runtime.scheduler import Scheduler
from specreg.runtime.slots import SlotPool
from specreg.runtime.stats import RunStats
from specreg.runtime.workers import RankGroup
from specreg.sampling_params import SEED_RANGE, SamplingParams

__all__ = ["Engine", "GenerateOutputs"]


class GenerateOutputs(Sequence[RequestOutput]):
    """The outputs of one `generate` call, in the order of the prompts, and its `stats`."""

    def __init__(self, outputs: Sequence[RequestOutput], stats: RunStats) -> None:
        self._outputs = list(outputs)
        self.stats = stats

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...
    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        return self._outputs[index]

    def __len__(self) -> int:
        return len(self._outputs)


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
        self._runner = runner
        self._seeds = random.Random(config.seed)
        self._scheduler = _scheduler(runner.models)
        self._is_closed = False

    @property
    def plan(self) -> DraftLogitsPlan | None:
        """The final plan of the draft-logits cache; None without a speculator."""
        return self.models.drafting.plan if self.models.drafting is not None else None

    @property
    def process_ids(self) -> list[int]:
        """Processes of ranks 1 and up, in order."""
        return self._group.process_ids

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
        self._is_closed = True
        self._group.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
            RankDivergenceError: the ranks' proposals differ.
            RankFailedError: another rank died; its error is named.
        """
        if self._is_closed:
            raise ConfigError(
                "the engine cannot generate",
                where="Engine.generate",
                got="an engine that was closed, by `close` or by an error in an earlier run",
                fix="build a new engine with Engine.from_config",
            )
        params = _one_each(sampling_params or SamplingParams(), len(prompts))
        requests = [
            self._request(index, prompt, each)
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        stats = RunStats(
            num_accepted_by_position=[0] * self.models.num_speculative_tokens,
            draft_logits_bytes_per_rank=self.plan.bytes_per_rank if self.plan else 0,
            num_kv_blocks=self.models.num_kv_blocks,
        )
        started, preempted = time.perf_counter(), self._scheduler.num_preemptions
        self._group.tp.counts.clear()
        with self._running():
            for request in requests:
                self._scheduler.add(request)
            while self._scheduler.has_work:
                for request in self._step(stats):
                    if on_finish is not None:
                        on_finish(request.index)
        stats.seconds = time.perf_counter() - started
        stats.num_preemptions = self._scheduler.num_preemptions - preempted
        stats.num_collectives = dict(self._group.tp.counts)
        stats.num_emitted_tokens = sum(len(request.output_token_ids) for request in requests)
        outputs = [self._output(p, r) for p, r in zip(prompts, requests, strict=True)]
        return GenerateOutputs(outputs, stats)

    def _step(self, stats: RunStats) -> list[Request]:
        """One step on every rank: schedule, execute, update. Returns the requests that ended."""
        plan = self._scheduler.schedule()
        self._group.tp.broadcast_bytes(plan.to_bytes())
        output = self._runner.execute(plan)
        stats.count(plan, output)
        return self._scheduler.update(output)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Wake the other ranks and, at the end, send them back to waiting; an error ends them."""
        try:
            with self._group.explaining_failures():
                self._group.begin_run()
                yield
                self._group.tp.broadcast_bytes(b"")
        except BaseException:
            self.close()
            raise

    def _request(self, index: int, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        token_ids = self._token_ids(index, prompt)
        room = self.models.max_model_len - len(token_ids)
        vocab_size = self.models.target.vocab_size
        if not token_ids or room < 1 or not all(0 <= token < vocab_size for token in token_ids):
            raise AdmissionError(
                "a prompt cannot be admitted",
                where=f"prompt {index}",
                got=f"{len(token_ids)} token ids; allowed: 1 to {self.models.max_model_len - 1}, "
                f"each of 0..{vocab_size - 1}",
                fix="shorten the prompt, raise max_model_len, or mend its token ids",
            )
        tokenizer = self.models.tokenizer
        if params.stop and tokenizer is None:
            raise AdmissionError(
                "stop strings cannot be found",
                where=f"SamplingParams.stop of prompt {index}",
                got="a target without a tokenizer",
                fix="use stop_token_ids, or add the tokenizer's files to the target directory",
            )
        return Request(
            index=index,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_len=len(token_ids) + min(params.max_tokens, room),
            params=params,
            seed=self._seeds.randrange(*SEED_RANGE) if params.seed is None else params.seed,
            eos_token_ids=self.models.eos_token_ids,
            decode=tokenizer.decode if tokenizer is not None else None,
        )

    def _token_ids(self, index: int, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.models.tokenizer is None:
            raise AdmissionError(
                "a text prompt cannot be tokenised",
                where=f"prompt {index}",
                got="a target without a tokenizer",
                fix="pass token ids, or add the tokenizer's files to the target directory",
            )
        return self.models.tokenizer.encode(prompt)

    def _output(self, prompt: str | Sequence[int], request: Request) -> RequestOutput:
        assert request.finish_reason is not None
        token_ids = request.output_token_ids
        text = request.decode(token_ids) if request.decode is not None else ""
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            text=text[: request.text_end],
            token_ids=token_ids,
            finish_reason=request.finish_reason,
        )


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise AdmissionError(
            "sampling parameters do not match the prompts",
            where="sampling_params",
            got=f"{len(params)} for {num_prompts} prompts; allowed: one for all, or one a prompt",
            fix="pass a single SamplingParams, or a list as long as the prompts",
        )
    return params


def _scheduler(models: LoadedModels) -> Scheduler:
    config = models.config
    return Scheduler(
        slots=SlotPool(config.max_num_seqs, models.num_owners),
        blocks=BlockAllocator(models.num_kv_blocks, config.block_size),
        max_model_len=models.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_speculative_tokens=models.num_speculative_tokens,
        prefill_lookahead=models.needs.prefill_lookahead,
        needs_history=models.needs.needs_token_history,
    )
