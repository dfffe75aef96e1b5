"""A request while it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specreg.grammar import allowed_bitmasks
from specreg.logprobs import TokenLogprobs
from specreg.runtime.outputs import RequestDelta
from specreg.runtime.step import encode_masks
from specreg.runtime.text_decoder import TextDecoder
from specreg.sampling_params import SamplingParams

__all__ = ["FREE_SLOT", "Request"]

FREE_SLOT = -1


@dataclass(eq=False)
class Request:
    """A prompt and what has become of it. Lives on rank 0 only.

    Attributes:
        index: order of arrival.
        token_ids: the prompt and, behind it, what was emitted.
        num_prompt_tokens: where the prompt ends.
        max_len: length at which the request ends with `finish_reason: "length"`.
        params: sampling parameters, with the temperature settled.
        seed: of every draw.
        eos_token_ids: tokens that end it.
        decoder: of its output; None without a tokenizer.
        slot: request state index while it runs; -1 while it waits.
        num_computed: leading tokens whose KV is in the pool.
        drafts: tokens to verify in the next step.
        logprobs: one an emitted token when the request asks for them.
        finish_reason: see `RequestOutput`; None until it has ended.
        text_end: characters of the output before the stop string that ended it.
    """

    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_len: int
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    decoder: TextDecoder | None = None
    slot: int = FREE_SLOT
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    text_end: int | None = None
    _num_decoded_tokens: int = 0
    _num_delivered_tokens: int = 0
    _num_delivered_characters: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens that are known and not yet computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def text(self) -> str:
        """Output that no later token can take back; all of it once the request has ended.

        Decodes what has come since the last time: a request that nobody looks at costs nothing.
        """
        if self.decoder is None:
            return ""
        self._decode()
        if self.finish_reason is not None:
            self.decoder.finish()
            return self.decoder.text[: self.text_end]
        text = self.decoder.text
        return text[: len(text) - _length_of_begun_stop(text, self.params.stop)]

    def accept(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        *,
        has_failed: bool = False,
    ) -> None:
        """Append emitted tokens until one ends the request.

        Args:
            tokens: in order.
            logprobs: one a token, or none.
            has_failed: nothing could be emitted behind `tokens`: the request ends there.
        """
        for count, token in enumerate(tokens):
            self.token_ids.append(token)
            self.logprobs += logprobs[count : count + 1]
            if self._ends_at(token):
                break
        if has_failed and self.finish_reason is None:
            self.finish_reason = "error"

    def reset(self) -> None:
        """Back to waiting: what was computed is lost, what was emitted is not."""
        self.slot, self.num_computed, self.drafts = FREE_SLOT, 0, []

    def bitmasks(self, drafts: Sequence[int]) -> str:
        """Allowed tokens of the rows that verify `drafts`; empty without a grammar."""
        if self.params.grammar is None:
            return ""
        return encode_masks(allowed_bitmasks(self.params.grammar, self.output_token_ids, drafts))

    def take_delta(self) -> RequestDelta:
        """What has come since this was last called."""
        text, start = self.text, self._num_delivered_tokens
        delta = RequestDelta(
            index=self.index,
            text=text[self._num_delivered_characters :],
            token_ids=self.token_ids[self.num_prompt_tokens + start :],
            logprobs=self.logprobs[start:] if self.params.wants_logprobs else None,
            finish_reason=self.finish_reason,
        )
        self._num_delivered_tokens, self._num_delivered_characters = (
            self.num_output_tokens,
            len(text),
        )
        return delta

    def _ends_at(self, token: int) -> bool:
        params = self.params
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        if self._holds_a_stop_string() or is_eos or token in params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _holds_a_stop_string(self) -> bool:
        """Whether the newest token completes one; only then is the output decoded on the way."""
        if not self.params.stop or self.decoder is None:
            return False
        num_before = len(self.decoder.text)
        self._decode()
        text = self.decoder.text
        places = [text.find(stop, max(0, num_before - len(stop) + 1)) for stop in self.params.stop]
        found = [place for place in places if place >= 0]
        if found:
            self.text_end = min(found)
        return bool(found)

    def _decode(self) -> None:
        assert self.decoder is not None
        new = self.token_ids[self.num_prompt_tokens + self._num_decoded_tokens :]
        if new:
            self.decoder.append(new)
            self._num_decoded_tokens += len(new)


def _length_of_begun_stop(text: str, stops: Sequence[str]) -> int:
    """Trailing characters of `text` that may turn out to begin a stop string."""
    lengths = (
        length
        for stop in stops
        for length in range(min(len(stop) - 1, len(text)), 0, -1)
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
