"""Randomly initialised MTP modules whose shape fits a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.model_config import text_config_of
from specreg.testing import save_random_checkpoint

__all__ = ["random_drafter", "random_multi_module_drafter"]

NUM_MODULES = 3
SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def random_drafter(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """A module in the form of the `speculators` library, its layer like one of Qwen3."""
    decoder = _decoder(target_config)
    config = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": "mtp",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        "speculators_model_type": "mtp",
        "transformer_layer_config": {**decoder, "model_type": "qwen3"},
    }
    shapes = {
        "input_proj.weight": (decoder["hidden_size"], 2 * decoder["hidden_size"]),
        **_vectors(
            decoder["hidden_size"], "hidden_layernorm", "token_layernorm", "final_layernorm"
        ),
        **_vectors(decoder["head_dim"], "self_attn.q_norm", "self_attn.k_norm"),
        **_layer(decoder),
    }
    named = {f"mtp_layers.0.{name}": shape for name, shape in shapes.items()}
    save_random_checkpoint(directory, config, named)
    return {"method": "mtp", "model": str(directory)}


def random_multi_module_drafter(
    directory: Path, target_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Three modules with the names that GLM gives them, their heads the target's."""
    decoder = _decoder(target_config)
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": NUM_MODULES,
        **decoder,
    }
    shapes = {
        "eh_proj.weight": (decoder["hidden_size"], 2 * decoder["hidden_size"]),
        **_vectors(decoder["hidden_size"], "enorm", "hnorm", "shared_head.norm"),
        **_layer(decoder),
    }
    first = decoder["num_hidden_layers"]
    named = {
        f"model.layers.{first + module}.{name}": shape
        for module in range(NUM_MODULES)
        for name, shape in shapes.items()
    }
    save_random_checkpoint(directory, config, named)
    return {"method": "mtp", "model": str(directory), "num_speculative_tokens": NUM_MODULES}


def _decoder(target_config: Mapping[str, Any]) -> dict[str, Any]:
    text = text_config_of(target_config)
    sizes = {key: text[key] for key in SIZE_KEYS if text.get(key) is not None}
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    return {**sizes, "head_dim": head_dim}


def _vectors(size: int, *names: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,) for name in names}


def _layer(decoder: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = decoder["hidden_size"], decoder["intermediate_size"]
    query = decoder["num_attention_heads"] * decoder["head_dim"]
    kv = decoder["num_key_value_heads"] * decoder["head_dim"]
    return {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **_vectors(hidden, "input_layernorm", "post_attention_layernorm"),
    }
