"""Watermarks in drafts: the protocol of what draws them, and one sampler with a secret key.

A draft watermarker replaces the draws of a proposal. Over its keys a draft still follows the draft
distribution, so verification, which knows nothing of it, keeps what is emitted on the target's
distribution; drafts that are accepted carry the mark into the text, other tokens do not.

`KeyedGumbel` draws by Gumbel-max with noise that depends on the key, the newest tokens and the
token's id alone. Whoever holds the key can recompute it from a text: tokens of a marked text have
noise that wins, those of another text any noise. Source: Aaronson (2022), as a sampler for drafts;
its noise is that of `specreg.kernels.gumbel_sample`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from specreg.errors import ConfigError, InternalError
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.gumbel_sample.op import gumbel_sample
from specreg.kernels.gumbel_sample.reference import noise_uniform_reference
from specreg.kernels.random import STREAM_DRAFT, random_words_reference

if TYPE_CHECKING:
    from specreg.config import EngineConfig

__all__ = [
    "KEY_VARIABLE",
    "DraftWatermarker",
    "KeyedGumbel",
    "WatermarkInputs",
    "WatermarkScore",
    "WatermarkerContext",
    "key_state",
    "keyed_gumbel",
    "unmasked_keyed_gumbel",
]

KEY_VARIABLE = "SPECREG_WATERMARK_KEY"
CONTEXT_SIZE = 4

_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_WEYL = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class WatermarkerContext:
    """What the factory of a draft watermarker gets; it returns a `DraftWatermarker`.

    Attributes:
        config: the whole engine configuration.
        vocab_size: columns of the target's vocabulary.
        device: where drafts are sampled.
    """

    config: EngineConfig
    vocab_size: int
    device: torch.device


@dataclass(frozen=True)
class WatermarkInputs:
    """One step of a proposal, for a watermarker to draw: the arguments of `gumbel_sample`.

    Attributes:
        logits: `[n, width]` draft logits before temperature.
        slots: int64 `[n]`, request state index; -1 marks a row that samples nothing.
        steps: int64 `[n]`, index of the token in its proposal.
        context: int64 `[n, context_size]`, the newest tokens before the draft, oldest first, those
            drafted so far included; -1 before the start of the request.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
        cache: where owned rows go, with their statistics; None stores nothing. Written in place.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]` of a reduced draft head; None without one.
        num_nans: int32 `[max_num_seqs]` by slot, raised for rows with a NaN. Written in place.
    """

    logits: Tensor
    slots: Tensor
    steps: Tensor
    context: Tensor
    temperature: Tensor
    cache: DraftLogitsView | None
    vocab_size: int
    target_ids: Tensor | None
    num_nans: Tensor


class DraftWatermarker(Protocol):
    """Draws and stores the drafts of a run in place of `draft_sample`.

    Attributes:
        honors_owner_mask: stores rows of requests that this rank owns and no others; must be what
            its factory declares.
        context_size: tokens before a draft that it looks at.
    """

    honors_owner_mask: bool
    context_size: int

    def sample(self, inputs: WatermarkInputs) -> Tensor:
        """Draw a token from each row; int64 `[n]` target ids, -1 where `slots` is.

        Stores each owned row whole with the statistics of what it was drawn from, as
        `draft_sample` does: over the watermarker's keys the token must follow exactly that
        distribution. Called once a step, the same on every rank; must not synchronise with the
        host.
        """
        ...


class WatermarkScore(NamedTuple):
    """How much a text looks marked.

    Attributes:
        num_tokens: tokens that were scored, each pair of context and token once.
        z: standard deviations above what unmarked text gives; near 0 for text without the mark.
    """

    num_tokens: int
    z: float


class KeyedGumbel:
    """Gumbel-max whose noise follows from a secret key and the newest tokens.

    Args:
        key: 64 bits; whoever has them can detect the mark and forge it.
        context_size: tokens that the noise depends on. More are harder to learn from many texts,
            fewer survive more editing.
        honors_owner_mask: False stores the rows of every request, as a sampler does that knows no
            owners; such a run keeps a replicated cache.
    """

    def __init__(
        self, key: int, *, context_size: int = CONTEXT_SIZE, honors_owner_mask: bool = True
    ) -> None:
        self.key = (key + 2**63) % 2**64 - 2**63
        self._start: Tensor | int = int(key_state(torch.tensor(self.key)))
        self.context_size = context_size
        self.honors_owner_mask = honors_owner_mask

    def seeds(self, context: Tensor) -> Tensor:
        """int64 `[n]`, the seed of the noise after each row of `context [n, context_size]`."""
        state = torch.zeros_like(context[:, 0]) + self._start
        for column in context.unbind(1):
            state = _mix((state ^ (column + 2)) + _WEYL)
        return state

    def sample(self, inputs: WatermarkInputs) -> Tensor:
        """As `DraftWatermarker.sample`.

        Raises:
            InternalError: a sharded cache where rows of every request would be stored.
            TensorError: what `gumbel_sample` refuses.
        """
        cache = inputs.cache
        if cache is not None and cache.shard.num_shards > 1 and not self.honors_owner_mask:
            raise InternalError(
                "a watermarker that stores every request's rows is handed a sharded cache",
                where="KeyedGumbel(honors_owner_mask)",
                got=f"num_shards={cache.shard.num_shards}; allowed: 1 where it is False",
                fix="declare honors_owner_mask on its factory as on the object",
            )
        max_num_seqs = len(inputs.temperature)
        by_slot = inputs.slots.new_zeros(max_num_seqs + 1)
        # Padding rows land behind the last slot.
        places = torch.where(inputs.slots < 0, max_num_seqs, inputs.slots)
        by_slot.index_copy_(0, places, self.seeds(inputs.context))
        origin = torch.zeros_like(inputs.steps)
        return gumbel_sample(
            inputs.logits,
            inputs.slots,
            inputs.steps,
            origin,
            inputs.temperature,
            by_slot[:-1],
            cache,
            vocab_size=inputs.vocab_size,
            target_ids=inputs.target_ids,
            num_nans=inputs.num_nans,
            noise_steps=origin,
        )

    def score(self, tokens: Tensor) -> WatermarkScore:
        """How much a text looks marked with this key. Synchronises with the host.

        The noise of a token makes a uniform u; -log(u) has mean and variance 1 in a text that knows
        nothing of the key, and is larger where the noise won.

        Args:
            tokens: int64 `[n]` target ids of a text; the first `context_size` are only context.
        """
        size = self.context_size
        if len(tokens) <= size:
            return WatermarkScore(0, 0.0)
        windows = torch.unique(tokens.unfold(0, size + 1, 1), dim=0)
        words = random_words_reference(
            self.seeds(windows[:, :-1]),
            torch.zeros_like(windows[:, 0]),
            0,
            STREAM_DRAFT,
            windows[:, -1],
        )
        surprise = -noise_uniform_reference(words[0]).double().log()
        z = (float(surprise.sum()) - len(windows)) / math.sqrt(len(windows))
        return WatermarkScore(len(windows), z)


def key_state(keys: Tensor) -> Tensor:
    """int64 states of int64 keys before any context; related keys have unrelated ones."""
    return _mix(keys + _WEYL)


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 in which each bit of the result depends on each bit of `x`.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    x = (x ^ _shifted(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shifted(x, 27)) * _MULTIPLIERS[1]
    return x.bitwise_xor(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and(2 ** (64 - bits) - 1)


def keyed_gumbel(context: WatermarkerContext) -> KeyedGumbel:
    """A `KeyedGumbel` with the key of the environment. Raises `ConfigError` without one."""
    return KeyedGumbel(_key(os.environ))


def unmasked_keyed_gumbel(context: WatermarkerContext) -> KeyedGumbel:
    """The same, storing the rows of every request. Raises `ConfigError` without a key."""
    return KeyedGumbel(_key(os.environ), honors_owner_mask=False)


def _key(environ: Mapping[str, str]) -> int:
    """64 bits of the secret in the environment, which may be any text."""
    secret = environ.get(KEY_VARIABLE, "")
    if not secret:
        raise ConfigError(
            "a watermark needs a secret key",
            where=f"environment variable {KEY_VARIABLE}",
            got="nothing; allowed: any text, the same for every rank and for detection",
            fix=f"set {KEY_VARIABLE}, and keep it: the mark cannot be detected without it",
        )
    digest = hashlib.blake2b(secret.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
