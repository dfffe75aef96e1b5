"""Bytes of the draft-logits cache and of the target's KV: arithmetic only, nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import ConfigError
from specreg.spelling import known_names

__all__ = [
    "DTYPE_BYTES",
    "GIB",
    "CacheSize",
    "draft_logits_size",
    "dtype_bytes",
    "kv_bytes_per_token",
    "kv_cache_gain_percent",
]

GIB = 1024**3
DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

_STATISTIC_BYTES = 4  # fp32
_STATE_BYTES = 1
_ID_BYTES = 4  # int32


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of the floating-point type named `dtype`. Raises `ConfigError`."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            "a cache of this element type cannot be sized",
            where="dtype",
            got=f"{dtype!r}; {known_names(dtype, DTYPE_BYTES)}",
            fix="name one of the known types",
        )
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class CacheSize:
    """What one rank allocates for draft logits.

    Attributes:
        shape: `(rows, num_speculative_tokens, width)` of the logits array.
        dtype: its element type by name.
        logits_bytes: bytes of the logits array alone.
        side_bytes: statistics, states, ids and tables beside it.
    """

    shape: tuple[int, int, int]
    dtype: str
    logits_bytes: int
    side_bytes: int

    @property
    def total_bytes(self) -> int:
        """Logits array and side arrays together."""
        return self.logits_bytes + self.side_bytes


def draft_logits_size(
    layout: DraftLogitsLayout,
    *,
    rows: int,
    num_speculative_tokens: int,
    vocab_size: int,
    dtype: str,
    draft_vocab_size: int | None = None,
    num_candidates: int | None = None,
) -> CacheSize:
    """Size of a rank's cache in `layout`.

    Each (row, step) carries two fp32 statistics (temperature, logsumexp) and one state byte; the
    states have one row more than the logits, where writes for rows of other ranks go.
    `draft_vocab` adds an int32 `[vocab_size]` table. A speculator with candidates writes the other
    two, always in fp32 so that its tokens do not depend on the layout, and adds their int32 ids, in
    `dense` because the next proposal clears the previous candidates by them.

    Args:
        layout: what a (row, step) holds.
        rows: requests that the rank owns, at most (`rows_per_rank`).
        num_speculative_tokens: steps a row.
        vocab_size: the target's vocabulary.
        dtype: element type of stored logits; scores of candidates are fp32 whatever it says.
        draft_vocab_size: columns of a reduced head; needed by `draft_vocab`.
        num_candidates: candidates a step; needed by `top_k`.
    """
    cells = rows * num_speculative_tokens
    side_bytes = 2 * _STATISTIC_BYTES * cells + _STATE_BYTES * (cells + num_speculative_tokens)
    if layout is DraftLogitsLayout.DRAFT_VOCAB:
        width = _needed(draft_vocab_size, layout, "draft_vocab_size")
        side_bytes += _ID_BYTES * vocab_size
    else:
        is_top_k = layout is DraftLogitsLayout.TOP_K
        width = _needed(num_candidates, layout, "num_candidates") if is_top_k else vocab_size
        if num_candidates is not None:
            side_bytes += _ID_BYTES * cells * num_candidates
            dtype = "float32"
    return CacheSize(
        shape=(rows, num_speculative_tokens, width),
        dtype=dtype,
        logits_bytes=cells * width * dtype_bytes(dtype),
        side_bytes=side_bytes,
    )


def _needed(value: int | None, layout: DraftLogitsLayout, name: str) -> int:
    if value is None:
        raise ConfigError(
            f"the {layout.value} layout cannot be sized",
            where=name,
            got="None; allowed: a positive number",
            fix=f"declare Capabilities.{name}, or choose another layout",
        )
    return value


# Any of these makes a token's KV differ from layers x 2 x heads x head_dim.
_IRREGULAR_KV = ("kv_lora_rank", "global_head_dim", "num_kv_shared_layers")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")


def kv_bytes_per_token(model_config: Mapping[str, Any], dtype: str) -> int | None:
    """Bytes that a rank keeps for one token of a model, keys and values of all layers.

    Every rank is taken to hold every layer and every KV head (only the LM head is sharded), and
    every attention layer to keep every token.

    Args:
        model_config: the text model's `config.json`.
        dtype: element type of the KV.

    Returns:
        None when the config does not tell: a key is missing, or the model keeps something else than
        equal keys and values in every layer.
    """
    layer_types = model_config.get("layer_types") or ()
    is_attention = isinstance(layer_types, list | tuple) and all(
        kind in _ATTENTION_LAYERS for kind in layer_types
    )
    if not is_attention or any(model_config.get(key) for key in _IRREGULAR_KV):
        return None
    num_layers = _count(model_config, "num_hidden_layers")
    num_heads = _count(model_config, "num_attention_heads")
    num_kv_heads = _count(model_config, "num_key_value_heads") or num_heads
    head_dim = _count(model_config, "head_dim")
    if head_dim is None and num_heads is not None:
        head_dim = (_count(model_config, "hidden_size") or 0) // num_heads
    if num_layers is None or num_kv_heads is None or not head_dim:
        return None
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes(dtype)


def _count(model_config: Mapping[str, Any], key: str) -> int | None:
    value = model_config.get(key)
    return value if type(value) is int and value > 0 else None


def kv_cache_gain_percent(freed_bytes: int, kv_cache_bytes: float) -> float:
    """By how many percent a rank's KV cache grows when it gets the bytes that sharding frees."""
    return 100.0 * freed_bytes / kv_cache_bytes
