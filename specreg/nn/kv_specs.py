"""The attention layers of a Hugging Face decoder, read from its `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.capabilities import KVLayerSpec
from specreg.errors import CheckpointError
from specreg.model_config import text_config_of

__all__ = ["kv_specs_from_config"]

# Models whose published configs leave their layer pattern to the class: every n-th layer sees
# everything, the others a window.
_FULL_ATTENTION_EVERY: Mapping[str, int] = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "gpt_oss": 2,
}

# Sizes that configs of these types leave to the class.
_OWN_SIZES: Mapping[str, Mapping[str, int]] = {
    "gemma4_text": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
    "gemma4_unified_text": {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
}


def kv_specs_from_config(config: Mapping[str, Any]) -> tuple[KVLayerSpec, ...]:
    """One spec a decoder layer, in layer order, in the run's dtype. Imports no torch.

    `HFDecoder` checks the same facts on the loaded model.

    Args:
        config: the checkpoint's `config.json`.

    Raises:
        CheckpointError: a number that sizes the layers is missing.
    """
    told = text_config_of(config)
    text = {**_OWN_SIZES.get(told.get("model_type", ""), {}), **told}
    num_layers = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    num_heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    num_kv_heads = text.get("num_key_value_heads") or num_heads
    head_dim = text.get("head_dim")
    if not head_dim:
        head_dim = _number(text, "hidden_size", "n_embd", "d_model") // num_heads
    value_head_dim = text.get("v_head_dim")
    if text.get("kv_lora_rank"):  # latent attention, run over its expanded keys and values
        num_kv_heads = num_heads
        head_dim = _number(text, "qk_nope_head_dim") + _number(text, "qk_rope_head_dim")
    overrides = text.get("per_layer_config") or {}
    specs = []
    for layer, kind in enumerate(_layer_types(text, num_layers)):
        own = dict(overrides.get(str(layer), overrides.get(layer, {})))
        if kind == "full_attention" and not overrides:
            own.setdefault("head_dim", text.get("global_head_dim") or head_dim)
            if text.get("attention_k_eq_v"):
                own.setdefault("num_key_value_heads", text.get("num_global_key_value_heads"))
        own_dim = own.get("head_dim") or head_dim
        specs.append(
            KVLayerSpec(
                num_kv_heads=own.get("num_key_value_heads") or num_kv_heads,
                head_dim=own_dim,
                sliding_window=text.get("sliding_window") if kind == "sliding_attention" else None,
                value_head_dim=value_head_dim if value_head_dim != own_dim else None,
            )
        )
    return tuple(specs)


def _layer_types(text: Mapping[str, Any], num_layers: int) -> list[str]:
    """`full_attention` or `sliding_attention` (or another name the config uses) a layer."""
    declared = text.get("layer_types")
    if declared:
        return list(declared)
    is_windowed = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    if not is_windowed:
        return ["full_attention"] * num_layers
    if text.get("use_sliding_window"):
        first = text.get("max_window_layers", 0)
        return [_kind(layer >= first) for layer in range(num_layers)]
    period = text.get("sliding_window_pattern") or _FULL_ATTENTION_EVERY.get(
        text.get("model_type", "")
    )
    return [_kind(not period or (layer + 1) % period != 0) for layer in range(num_layers)]


def _kind(is_sliding: bool) -> str:
    return "sliding_attention" if is_sliding else "full_attention"


def _number(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int):
            return value
    raise CheckpointError(
        "the decoder's layers cannot be sized",
        where=f"config.json, key {names[0]!r}",
        got=f"keys {', '.join(sorted(text)) or 'none'}; allowed: one of {', '.join(names)}",
        fix="add the key, or point to the directory whose config.json describes a decoder",
    )
