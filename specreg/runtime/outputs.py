"""What requests produce: whole outputs, and pieces of them as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from specreg.logprobs import TokenLogprobs
from specreg.runtime.stats import RunStats

__all__ = ["GenerateOutputs", "RequestDelta", "RequestOutput"]


@dataclass(frozen=True)
class RequestDelta:
    """What a request has produced since its last delta.

    Attributes:
        index: of the prompt.
        text: further text, whole characters only, with nothing that a stop string may yet cut off;
            empty without a tokenizer.
        token_ids: further tokens.
        logprobs: one a token when the request asks for them, else None.
        finish_reason: see `RequestOutput`; None while the request goes on.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """What a request has produced.

    Attributes:
        prompt: the text given; None when token ids were given.
        prompt_token_ids: what the target read.
        text: the decoded output, cut before a stop string; empty without a tokenizer.
        token_ids: the emitted tokens, the one that ended the request included.
        finish_reason: `"stop"` (end-of-sequence, stop token or stop string), `"length"`,
            `"cancelled"`, or `"error"`: the target gave no token a probability, because all its
            logits were NaN or -inf, or what the request allows left none.
        logprobs: one an emitted token when the request asks for them, else None.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


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
