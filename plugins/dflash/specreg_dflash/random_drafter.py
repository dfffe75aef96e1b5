"""Randomly initialised drafters for a target of any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specreg.config_reader import ConfigReader
from specreg.model_config import text_config_of
from specreg.testing import save_random_checkpoint

__all__ = ["backbone_shapes", "hf_config", "random_dflash"]

BLOCK_SIZE = 8
WINDOW = 16
LAYER_TYPES = ("sliding_attention", "full_attention")


def random_dflash(
    directory: Path, target_config: Mapping[str, Any], *, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """Write a DFlash drafter of two layers, one of each kind, that shares the target's embedding.

    Args:
        directory: an empty one.
        target_config: the target's `config.json`.
        draft_vocab_size: columns of a reduced head of its own; None shares the target's.

    Returns:
        The speculative configuration that selects it.
    """
    config = hf_config(target_config, "DFlashDraftModel")
    shapes = backbone_shapes(config)
    integers = {}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
        shapes["lm_head.weight"] = (draft_vocab_size, config["hidden_size"])
        spread = torch.linspace(0, config["vocab_size"] - 1, draft_vocab_size).long()
        integers["d2t"] = spread - torch.arange(draft_vocab_size)
    save_random_checkpoint(directory, config, shapes, integers=integers)
    return {"method": "dflash", "model": str(directory)}


def hf_config(
    target_config: Mapping[str, Any], architecture: str, **section: Any
) -> dict[str, Any]:
    """A config in the Hugging Face form for a target, with the target's widths.

    Args:
        target_config: the target's `config.json`.
        architecture: of the drafter.
        section: more keys of `dflash_config`.
    """
    target = ConfigReader(text_config_of(target_config), "the target's config.json")
    num_layers, num_heads = (
        target.integer(f"num_{parts}") for parts in ("hidden_layers", "attention_heads")
    )
    hidden_size, vocab_size = target.integer("hidden_size"), target.integer("vocab_size")
    entries = sorted({1, (num_layers + 1) // 2, num_layers - 1} - {0})
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "intermediate_size": target.integer("intermediate_size", None) or 4 * hidden_size,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_attention_heads": num_heads,
        "num_key_value_heads": target.integer("num_key_value_heads", None) or num_heads,
        "head_dim": target.integer("head_dim", None) or hidden_size // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": target.integer("max_position_embeddings", 2048),
        "vocab_size": vocab_size,
        "attention_bias": False,
        "layer_types": list(LAYER_TYPES),
        "sliding_window": WINDOW,
        "num_target_layers": num_layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": vocab_size - 1,
            "target_layer_ids": [entry - 1 for entry in entries],
            **section,
        },
    }


def backbone_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of the backbone of a config in the Hugging Face form, embedding and head left out."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    num_taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (config["head_dim"],),
        "self_attn.k_norm": (config["head_dim"],),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
