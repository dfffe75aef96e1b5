"""What the decoder layers of base models are like, where their configs do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["LAYER_KINDS", "PLAIN", "LayerKind"]


@dataclass(frozen=True)
class LayerKind:
    """What a base model's decoder layer is like where its config does not say, or has no key.

    Attributes:
        has_head_norms: queries and keys are normalised a head; None asks the key `use_qk_norm`.
        has_gated_attention: unless the key `attn_output_gate` is false.
        has_zero_centred_norms: norms scale by `1 + weight`, the module's own included.
        attention_bias: default of the key; where it is None there is no key, and a bias.
        has_output_bias: the output projection has a bias where queries, keys and values do.
        defaults: of keys that a `speculators` config leaves out when they have these values.
    """

    has_head_norms: bool | None = None
    has_gated_attention: bool = False
    has_zero_centred_norms: bool = False
    attention_bias: bool | None = False
    has_output_bias: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _sizes(hidden: int, inner: int | None, heads: int, kv_heads: int, head_dim: int | None) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


_PARTIAL = {"partial_rotary_factor": 0.25}
PLAIN = LayerKind()
_QWEN2 = LayerKind(
    has_head_norms=False,
    attention_bias=None,
    has_output_bias=False,
    defaults=_sizes(4096, 22016, 32, 32, None),
)
_QWEN3 = LayerKind(has_head_norms=True, defaults=_sizes(4096, 22016, 32, 32, 128))
_QWEN3_NEXT = LayerKind(
    has_head_norms=True,
    has_gated_attention=True,
    has_zero_centred_norms=True,
    defaults=_sizes(2048, 5632, 16, 2, 256) | _PARTIAL,
)
_QWEN3_5 = LayerKind(
    has_head_norms=True,
    has_gated_attention=True,
    has_zero_centred_norms=True,
    defaults=_sizes(4096, 12288, 16, 4, 256) | _PARTIAL,
)
_QWEN3_5_MOE = LayerKind(
    has_head_norms=True,
    has_gated_attention=True,
    has_zero_centred_norms=True,
    defaults=_sizes(2048, None, 16, 2, 256) | _PARTIAL,
)
_QKV_BIAS = LayerKind(has_output_bias=False)
_STEP = LayerKind(has_head_norms=True, has_zero_centred_norms=True, has_output_bias=False)

LAYER_KINDS: Mapping[str, LayerKind] = MappingProxyType(
    {
        "qwen2": _QWEN2,
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3,
        "qwen3_next": _QWEN3_NEXT,
        "qwen3_5": _QWEN3_5,
        "qwen3_5_text": _QWEN3_5,
        "qwen3_5_moe": _QWEN3_5_MOE,
        "qwen3_5_moe_text": _QWEN3_5_MOE,
        "mimo": LayerKind(has_head_norms=False, attention_bias=True, has_output_bias=False),
        "glm4_moe": _QKV_BIAS,
        "step3p5": _STEP,
    }
)
