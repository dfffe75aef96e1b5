"""Outputs while they come, and the way to stop a request that is no longer wanted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType

from typing_extensions import Self

from specreg.errors import AdmissionError
from specreg.runtime.core import EngineCore
from specreg.runtime.outputs import GenerateOutputs, RequestDelta, RequestOutput
from specreg.runtime.request import Request

__all__ = ["RequestStream"]


class RequestStream(Iterator[RequestDelta]):
    """Deltas of the requests of one run, in the order in which they were emitted.

    Taking a delta runs a step of the engine when no other delta is left, so the consumer sets the
    pace; several ranks wait for each other for 10 minutes at most. The last delta of each request
    has a `finish_reason`. A stream that is not read to its end must be closed, which cancels what
    is left; use it as a context manager. It belongs to one thread.

    Args:
        core: executes steps.
        requests: of the run, a prompt each.
        prompts: as they were given.

    Attributes:
        stats: of the run; complete when it has ended.
    """

    def __init__(
        self,
        core: EngineCore,
        requests: Sequence[Request],
        prompts: Sequence[str | Sequence[int]],
    ) -> None:
        self.stats = core.begin_run()
        self._core = core
        self._requests = list(requests)
        self._prompts = list(prompts)
        self._deltas: deque[RequestDelta] = deque()
        self._is_open = True
        for request in requests:
            core.scheduler.add(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __next__(self) -> RequestDelta:
        """The next delta.

        Raises:
            StopIteration: every request has ended.
            RankDivergenceError: the ranks' proposals differ.
            RankFailedError: another rank died; its error is named.
        """
        while not self._deltas and self._is_open:
            if self._core.scheduler.has_work:
                self._deltas += [request.take_delta() for request in self._step()]
            else:
                self._end()
        if not self._deltas:
            raise StopIteration
        return self._deltas.popleft()

    def finished(self) -> Iterator[int]:
        """Read the stream to its end for nothing but the prompts whose requests have ended.

        No text is decoded on the way, save where stop strings are looked for.
        """
        while self._is_open:
            if self._core.scheduler.has_work:
                yield from (r.index for r in self._step() if r.finish_reason is not None)
            else:
                self._end()

    def cancel(self, index: int) -> bool:
        """End a request where it is: slot, blocks and cache rows are free for the next step.

        Its last delta has the `finish_reason` `"cancelled"`; what it has emitted is kept.

        Args:
            index: of the prompt.

        Returns:
            Whether it was still going on.

        Raises:
            AdmissionError: there is no such prompt.
        """
        if not 0 <= index < len(self._requests):
            raise AdmissionError(
                "there is no such request to cancel",
                where="RequestStream.cancel(index)",
                got=f"{index}; allowed: 0 to {len(self._requests) - 1}, the prompts of this stream",
                fix="pass the index of a delta",
            )
        request = self._requests[index]
        if request.finish_reason is not None or not self._is_open:
            return False
        self._core.scheduler.cancel(request)
        self._deltas.append(request.take_delta())
        return True

    def close(self) -> None:
        """Cancel what is left and let the ranks rest. Safe to call twice."""
        if self._is_open and self._core.is_running:
            for index in range(len(self._requests)):
                self.cancel(index)
            while self._core.scheduler.has_work:
                self._step()
            self._end()
        self._is_open = False

    def outputs(self) -> GenerateOutputs:
        """The outputs so far of requests that have ended; all of them once the stream has."""
        ended = [
            _output(prompt, request, request.finish_reason)
            for prompt, request in zip(self._prompts, self._requests, strict=True)
            if request.finish_reason is not None
        ]
        return GenerateOutputs(ended, self.stats)

    def _step(self) -> list[Request]:
        started = time.perf_counter()
        went_on = self._core.step(self.stats)
        self.stats.seconds += time.perf_counter() - started
        return went_on

    def _end(self) -> None:
        self._core.end_run(self.stats)
        self.stats.num_emitted_tokens = sum(r.num_output_tokens for r in self._requests)
        self._is_open = False


def _output(prompt: str | Sequence[int], request: Request, finish_reason: str) -> RequestOutput:
    return RequestOutput(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        text=request.text,
        token_ids=request.output_token_ids,
        finish_reason=finish_reason,
        logprobs=request.logprobs if request.params.wants_logprobs else None,
    )
