"""Randomly initialised LiLiCorr drafters for a target of any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.testing import save_random_checkpoint
from specreg_dflash.convolution.random_drafter import convolution_keys, convolution_shapes
from specreg_dflash.random_drafter import backbone_shapes, hf_config

__all__ = ["random_lilicorr"]

LATTICE = {
    "lilicorr_hidden_size": 32,
    "lilicorr_candidate_topk": 4,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_num_layers": 1,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 3.0,
}


def random_lilicorr(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write a LiLiCorr drafter of two layers with convolutions; as of `random_dflash2`."""
    config = hf_config(target_config, "LiLiCorrDraftModel", **LATTICE)
    config["dflash_config"] |= convolution_keys(config["hidden_size"])
    save_random_checkpoint(directory, config, _shapes(config))
    return {"method": "dflash", "model": str(directory)}


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a LiLiCorr config, embedding and head left out."""
    section, hidden = config["dflash_config"], config["hidden_size"]
    width, block_size = section["lilicorr_hidden_size"] or hidden, config["block_size"]
    heads, factor = section["lilicorr_num_heads"], section["lilicorr_factor_dim"]
    inner = int(width * section["lilicorr_mlp_ratio"])
    linears = {
        "pass_hidden_proj": (width, hidden),
        "context_proj": (width, hidden),
        "feature_mlp.up_proj": (width, 5),
        "feature_mlp.down_proj": (width, width),
        "factor_input_proj": (width, 3 * width),
        "out_head": (factor, width),
        "in_head": (factor, width),
        "anchor_out_head": (factor, width),
    }
    if width != hidden:
        linears["token_proj"] = (width, hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        "slot_embedding": (1, 1, block_size - 1, 1, width),
        "rank_embedding": (1, 1, 1, section["lilicorr_candidate_topk"], width),
        "relative_slot_bias": (heads, 2 * block_size - 1),
        "same_slot_bias": (heads,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for index in range(section["lilicorr_num_layers"]):
        layer = f"layers.{index}"
        linears[f"{layer}.attn.out_proj"] = (width, width)
        linears[f"{layer}.mlp.up_proj"] = (inner, width)
        linears[f"{layer}.mlp.down_proj"] = (width, inner)
        shapes[f"{layer}.attn.in_proj_weight"] = (3 * width, width)
        shapes[f"{layer}.attn.in_proj_bias"] = (3 * width,)
        shapes[f"{layer}.attn_norm.weight"] = shapes[f"{layer}.mlp_norm.weight"] = (width,)
    for name, shape in linears.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
    head = {f"lilicorr.{name}": shape for name, shape in shapes.items()}
    return backbone_shapes(config) | convolution_shapes(config) | head
