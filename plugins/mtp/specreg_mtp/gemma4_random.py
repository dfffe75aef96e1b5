"""Randomly initialised Gemma 4 assistants, and what `specreg check gemma4` proves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specreg.errors import ConfigError
from specreg.model_config import read_model_config, text_config_of
from specreg.testing import Subject, save_kit_target, save_random_checkpoint
from specreg_mtp.gemma4_config import DEFAULT_ROPES, FULL, SLIDING, UNIFIED
from specreg_mtp.gemma4_sharing import last_owners

__all__ = ["random_drafter", "save_random_assistant", "tiny_subject"]

PLAIN = "gemma4_assistant"
TARGET_TYPES = {"gemma4_text": PLAIN, "gemma4_unified_text": UNIFIED}
MAX_HIDDEN_SIZE = 64
NUM_SPECULATIVE_TOKENS = 3


def random_drafter(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write an assistant for a Gemma 4 target; see `SpeculatorSpec.random_drafter`.

    Raises:
        ConfigError: the target is no Gemma 4.
    """
    save_random_assistant(directory, target_config)
    return {
        "method": "mtp",
        "model": str(directory),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }


def tiny_subject(directory: Path) -> Subject:
    """A tiny Gemma 4 target and a random assistant."""
    target = save_tiny_target(directory / "target")
    config = read_model_config(str(target)) or {}
    return Subject(random_drafter(directory / "draft", config), str(target))


def save_tiny_target(directory: Path) -> Path:
    """Write the kit's target as a Gemma 4 with two layers of each type."""
    return save_kit_target(directory, "gemma4", num_hidden_layers=4)


def save_random_assistant(
    directory: Path,
    target_config: Mapping[str, Any],
    *,
    num_centroids: int | None = None,
    top_k: int = 1,
    **text_keys: Any,
) -> Path:
    """Write a small assistant with a layer for each layer type of the target.

    Args:
        directory: made if missing.
        target_config: the target's `config.json`.
        num_centroids, top_k: of an ordered head; None is a dense one.
        text_keys: keys of `text_config` that replace what is written otherwise.

    Raises:
        ConfigError: the target is no Gemma 4.
    """
    text = text_config_of(target_config)
    model_type = TARGET_TYPES.get(str(text.get("model_type")))
    if model_type is None:
        raise ConfigError(
            "an assistant drafts for Gemma 4 only",
            where="the target's config.json, model_type",
            got=f"{text.get('model_type')!r}; allowed: {', '.join(TARGET_TYPES)}",
            fix="name a Gemma 4 target, or another speculator",
        )
    owners = last_owners(target_config)
    layer_types = [kind for kind in (SLIDING, FULL) if kind in owners]
    head_dims = {kind: owners[kind].spec.head_dim for kind in layer_types}
    num_kv_heads = [owners[kind].spec.num_kv_heads for kind in layer_types]
    head_dim = head_dims[layer_types[0]]
    vocab_size, target_size = int(text["vocab_size"]), int(text["hidden_size"])
    hidden_size = min(MAX_HIDDEN_SIZE, target_size)
    own: dict[str, Any] = {
        "model_type": str(text["model_type"]),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": len(layer_types),
        "num_kv_shared_layers": len(layer_types),
        "num_attention_heads": 2 * math.lcm(*num_kv_heads),
        "head_dim": head_dim,
        "global_head_dim": head_dims.get(FULL, head_dim),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": layer_types,
        "sliding_window": owners[SLIDING].spec.sliding_window if SLIDING in owners else None,
        "rope_parameters": text.get("rope_parameters") or dict(DEFAULT_ROPES),
        **text_keys,
    }
    config = {
        "architectures": [
            "Gemma4UnifiedAssistantForCausalLM"
            if model_type == UNIFIED
            else "Gemma4AssistantForCausalLM"
        ],
        "model_type": model_type,
        "backbone_hidden_size": target_size,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": num_centroids is not None,
        "num_centroids": num_centroids or vocab_size,
        "centroid_intermediate_top_k": top_k,
        "text_config": own,
    }
    shapes = _shapes(own, head_dims, target_size)
    integers = {}
    if num_centroids is not None:
        shapes["masked_embedding.centroids.weight"] = (num_centroids, hidden_size)
        generator = torch.Generator().manual_seed(2)
        ordering = torch.randperm(vocab_size, generator=generator)
        integers["masked_embedding.token_ordering"] = ordering
    return save_random_checkpoint(directory, config, shapes, integers=integers)


def _shapes(
    text: Mapping[str, Any], head_dims: Mapping[str, int], target_size: int
) -> dict[str, tuple[int, ...]]:
    hidden, intermediate = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (hidden, 2 * target_size),
        "post_projection.weight": (target_size, hidden),
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index, kind in enumerate(text["layer_types"]):
        size = text["num_attention_heads"] * head_dims[kind]
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (size, hidden),
            "self_attn.q_norm.weight": (head_dims[kind],),
            "self_attn.o_proj.weight": (hidden, size),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
            "layer_scalar": (1,),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            own[f"{norm}_layernorm.weight"] = (hidden,)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    return shapes
