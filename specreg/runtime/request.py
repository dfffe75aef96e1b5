"""A request while it lives, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specreg.sampling_params import SamplingParams

__all__ = ["Request", "RequestOutput"]

FREE_SLOT = -1


@dataclass
class Request:
    """A prompt and what has become of it. Lives on rank 0 only.

    Attributes:
        index: order of arrival.
        token_ids: the prompt and, behind it, what was emitted.
        num_prompt_tokens: where the prompt ends.
        max_len: length at which the request ends with `finish_reason: "length"`.
        params: sampling parameters, with the temperature settled.
        seed: of every draw.
        slot: request state index while it runs; -1 while it waits.
        num_computed: leading tokens whose KV is in the pool.
        drafts: tokens to verify in the next step.
        finish_reason: `"stop"` or `"length"` once it has ended.
        text_end: characters of the output before the stop string that ended it.
    """

    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_len: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    decode: Callable[[Sequence[int]], str] | None = None
    slot: int = FREE_SLOT
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    text_end: int | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not yet computed."""
        return len(self.token_ids) - self.num_computed

    def accept(self, tokens: Sequence[int]) -> int:
        """Append emitted tokens until one ends the request; returns how many were kept."""
        for count, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            if self._ends_at(token):
                return count
        return len(tokens)

    def reset(self) -> None:
        """Back to waiting: what was computed is lost, what was emitted is not."""
        self.slot, self.num_computed, self.drafts = FREE_SLOT, 0, []

    def _ends_at(self, token: int) -> bool:
        params = self.params
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids or self._holds_a_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _holds_a_stop_string(self) -> bool:
        if not self.params.stop or self.decode is None:
            return False
        text = self.decode(self.output_token_ids)
        found = [at for at in map(text.find, self.params.stop) if at >= 0]
        if found:
            self.text_end = min(found)
        return bool(found)


@dataclass(frozen=True)
class RequestOutput:
    """What a request has produced.

    Attributes:
        prompt: the text given; None when token ids were given.
        prompt_token_ids: what the target read.
        text: the decoded output, cut before a stop string; empty without a tokenizer.
        token_ids: the emitted tokens, the one that ended the request included.
        finish_reason: `"stop"` (end-of-sequence, stop token or stop string) or `"length"`.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
