"""What a request asks of sampling, checked once at admission."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specreg.errors import AdmissionError
from specreg.grammar import Grammar

__all__ = ["SamplingParams"]

# The one place where "greedy" is decided: below this a division by the temperature overflows in
# half precision. Admission turns such a temperature into exactly 0; kernels only compare with 0.
SMALLEST_TEMPERATURE = 1e-5
SEED_RANGE = (-(2**63), 2**63)
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    The target's logits are changed in this order: `grammar`, `allowed_token_ids`, `logit_bias`,
    penalties, `temperature`, `top_k`, `top_p`, `min_p`.

    Attributes:
        max_tokens: tokens to emit at most.
        temperature: divides the logits; below 1e-5 it becomes exactly 0, which is greedy.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches `top_p`.
        min_p: keep tokens at least `min_p` times as probable as the most probable one.
        seed: 64-bit seed of every draw; None lets the engine choose one at admission.
        stop: strings that end the output; the output is cut before them.
        stop_token_ids: tokens that end the output, as the end-of-sequence token does.
        ignore_eos: go on after an end-of-sequence token.
        logit_bias: numbers in -100..100 added to logits, by token id.
        repetition_penalty: tokens of prompt and output have positive logits divided, and negative
            ones multiplied, by this; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, and once an occurrence, from the
            logits of tokens in the output; -2..2, 0 is off.
        allowed_token_ids: the only tokens that may be emitted; None allows all.
        grammar: says after each token which ones may follow; None allows all.
        logprobs: report the log probability of each emitted token and of this many most probable
            ones; None reports none. They are those of the target itself: the full distribution at
            temperature 1, before anything above changes it.
        logprob_token_ids: report these tokens' log probabilities at every position, too.

    Raises:
        AdmissionError: a value out of range.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = field(default=None, compare=False)
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._coerce_types()
        temperature = self.temperature
        self._check(
            "temperature", math.isfinite(temperature) and temperature >= 0, "a finite number >= 0"
        )
        object.__setattr__(
            self, "temperature", 0.0 if temperature < SMALLEST_TEMPERATURE else temperature
        )
        self._check("max_tokens", self.max_tokens >= 1, "an integer >= 1")
        in_range = 0 <= self.top_k < SEED_RANGE[1]
        self._check("top_k", in_range, "a 64-bit integer >= 0; 0 keeps all")
        self._check("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1")
        self._check("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1")
        self._check(
            "seed",
            self.seed is None or SEED_RANGE[0] <= self.seed < SEED_RANGE[1],
            "a signed 64-bit integer",
        )
        self._check("stop", all(self.stop), "non-empty strings")
        self._check(
            "logit_bias",
            all(abs(bias) <= LARGEST_BIAS for bias in self.logit_bias.values()),
            f"numbers in -{LARGEST_BIAS:g}..{LARGEST_BIAS:g} by token id",
        )
        self._check(
            "repetition_penalty",
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "a finite number > 0; 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(
                name,
                abs(getattr(self, name)) <= LARGEST_PENALTY,
                f"a number in -{LARGEST_PENALTY:g}..{LARGEST_PENALTY:g}; 0 is off",
            )
        self._check(
            "allowed_token_ids",
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "None, or at least one token id",
        )
        self._check("logprobs", self.logprobs is None or self.logprobs >= 0, "None, or >= 0")
        for name, ids in self._token_ids():
            self._check(name, all(token >= 0 for token in ids), "token ids >= 0")

    def _coerce_types(self) -> None:
        """Plain Python values, whatever number types came in; a single stop string is one."""
        for name in ("max_tokens", "top_k"):
            self._coerce(name, operator.index, "an integer")
        for name in ("seed", "logprobs"):
            self._coerce(name, _optional(operator.index), "an integer, or None")
        for name in (
            *("temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ):
            self._coerce(name, _number, "a number")
        for name in ("stop_token_ids", "logprob_token_ids"):
            self._coerce(name, _integers, "a sequence of token ids")
        self._coerce("allowed_token_ids", _optional(_integers), "None, or token ids")
        self._coerce("logit_bias", _biases, "a mapping of token ids to numbers")
        self._coerce("stop", _strings, "a string, or a sequence of strings")

    def _coerce(self, name: str, convert: Callable[[Any], Any], allowed: str) -> None:
        try:
            value = convert(getattr(self, name))
        except (TypeError, ValueError, AttributeError, OverflowError):
            self._check(name, False, allowed)
        else:
            object.__setattr__(self, name, value)

    @property
    def has_penalties(self) -> bool:
        """Whether what was used before changes what comes next."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids, and a number of log probabilities, that the vocabulary does not have.

        Raises:
            AdmissionError: naming the parameter.
        """
        for name, ids in self._token_ids():
            allowed = f"token ids in 0..{vocab_size - 1}"
            self._check(name, all(token < vocab_size for token in ids), allowed)
        self._check("logprobs", (self.logprobs or 0) <= vocab_size, f"at most {vocab_size}")

    def _token_ids(self) -> Iterable[tuple[str, Iterable[int]]]:
        return (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        )

    def _check(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise AdmissionError(
                f"the sampling parameter {field} is out of range",
                where=f"SamplingParams.{field}",
                got=f"{getattr(self, field)!r}; allowed: {allowed}",
                fix=f"pass {field} within its range",
            )


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(operator.index(value) for value in values)


def _biases(biases: Any) -> dict[int, float]:
    return {operator.index(token): _number(bias) for token, bias in biases.items()}


def _strings(values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else tuple(values)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError
    return strings
