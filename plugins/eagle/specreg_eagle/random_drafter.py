"""EAGLE heads with random weights that fit a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specreg.model_config import text_config_of
from specreg.testing import save_random_checkpoint
from specreg_eagle.aux_layers import default_aux_layer_ids

__all__ = ["write_eagle1", "write_eagle3", "write_peagle"]

NUM_SPECULATIVE_TOKENS = 3
MOST_DRAFT_COLUMNS = 8192


def write_eagle1(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """An EAGLE-1 head in research naming; embedding and head are the target's."""
    decoder = _decoder(target_config)
    width = decoder["hidden_size"]
    shapes = {
        "fc.weight": (width, 2 * width),
        "fc.bias": (width,),
        **_layer(decoder, width),
    }
    config = {"architectures": ["LlamaForCausalLM"], "bias": True, **decoder}
    save_random_checkpoint(directory, config, shapes)
    return _speculative("eagle", directory)


def write_eagle3(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """An EAGLE-3 head in the form of `speculators`, over a reduced vocabulary."""
    return _write_speculators("eagle3", directory, target_config, {}, {})


def write_peagle(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """A P-EAGLE head in the form of `speculators`, over a reduced vocabulary."""
    decoder = _decoder(target_config)
    shape = (1, 1, len(_aux_ids(target_config)) * decoder["hidden_size"])
    keys = {"mask_token_id": decoder["vocab_size"] - 1}
    return _write_speculators("peagle", directory, target_config, keys, {"mask_hidden": shape})


def _write_speculators(
    algorithm: str,
    directory: Path,
    target_config: Mapping[str, Any],
    keys: Mapping[str, Any],
    more: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    decoder, ids = _decoder(target_config), _aux_ids(target_config)
    width, vocab_size = decoder["hidden_size"], decoder["vocab_size"]
    num_columns = min(-(-vocab_size * 2 // 3), MOST_DRAFT_COLUMNS)
    # The ids are spread over the whole vocabulary.
    columns = torch.arange(num_columns)
    d2t = columns * vocab_size // num_columns - columns
    shapes = {
        "fc.weight": (width, len(ids) * width),
        "layers.0.input_layernorm.weight": (width,),
        "layers.0.hidden_norm.weight": (width,),
        "lm_head.weight": (num_columns, width),
        "norm.weight": (width,),
        **_layer(decoder, 2 * width),
        **more,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3DraftModel" if algorithm == "eagle3" else "PEagleDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
        "transformer_layer_config": decoder,
        "draft_vocab_size": num_columns,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "norm_before_residual": True,
        **keys,
    }
    save_random_checkpoint(directory, config, shapes, integers={"d2t": d2t})
    return _speculative(algorithm, directory)


def _decoder(target_config: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama layer with the sizes of the target's own."""
    text = text_config_of(target_config)
    heads = text["num_attention_heads"]
    return {
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "intermediate_size": text.get("intermediate_size") or 4 * text["hidden_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text.get("max_position_embeddings") or 2048,
    }


def _aux_ids(target_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The usual three entries; first, middle and last where the target is not deep enough."""
    num_layers = text_config_of(target_config)["num_hidden_layers"]
    ids = default_aux_layer_ids(num_layers)
    if sorted(set(ids)) == list(ids) and ids[0] >= 0:
        return ids
    return tuple(sorted({0, num_layers // 2, num_layers}))


def _layer(decoder: Mapping[str, Any], input_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of layer 0, but for its norms before attention."""
    width, middle = decoder["hidden_size"], decoder["intermediate_size"]
    queries = decoder["num_attention_heads"] * decoder["head_dim"]
    keys = decoder["num_key_value_heads"] * decoder["head_dim"]
    return {
        "layers.0.self_attn.q_proj.weight": (queries, input_size),
        "layers.0.self_attn.k_proj.weight": (keys, input_size),
        "layers.0.self_attn.v_proj.weight": (keys, input_size),
        "layers.0.self_attn.o_proj.weight": (width, queries),
        "layers.0.post_attention_layernorm.weight": (width,),
        "layers.0.mlp.gate_proj.weight": (middle, width),
        "layers.0.mlp.up_proj.weight": (middle, width),
        "layers.0.mlp.down_proj.weight": (width, middle),
    }


def _speculative(method: str, directory: Path) -> dict[str, Any]:
    return {
        "method": method,
        "model": str(directory),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
