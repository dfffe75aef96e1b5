"""Randomly initialised drafters of candidates for a target of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.testing import save_random_checkpoint
from specreg_dflash.random_drafter import backbone_shapes, hf_config

__all__ = ["dflash2_shapes", "lilicorr_shapes", "random_dflash2", "random_lilicorr"]

Shapes = dict[str, tuple[int, ...]]

CONV_KERNEL_SIZE, CONV_GROUP_SIZE = 2, 16
NUM_CANDIDATES = 4
RANK = 8
LATTICE = {
    "lilicorr_hidden_size": 32,
    "lilicorr_candidate_topk": NUM_CANDIDATES,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_num_layers": 1,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 3.0,
}


def random_dflash2(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write a DFlash2 drafter of two layers that shares the target's embedding and head.

    Args:
        directory: an empty one.
        target_config: the target's `config.json`.

    Returns:
        The speculative configuration that selects it.
    """
    config = hf_config(target_config, "DFlash2DraftModel")
    config["dflash_config"] |= _convolution(config["hidden_size"])
    config["dflash_config"] |= {"selector_rank": RANK, "selector_top_k": NUM_CANDIDATES}
    save_random_checkpoint(directory, config, dflash2_shapes(config))
    return {"method": "dflash", "model": str(directory)}


def random_lilicorr(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write a LiLiCorr drafter of two layers with convolutions; as of `random_dflash2`."""
    config = hf_config(target_config, "LiLiCorrDraftModel", **LATTICE)
    config["dflash_config"] |= _convolution(config["hidden_size"])
    save_random_checkpoint(directory, config, lilicorr_shapes(config))
    return {"method": "dflash", "model": str(directory)}


def dflash2_shapes(config: Mapping[str, Any]) -> Shapes:
    """Tensors of a DFlash2 config in the Hugging Face form, embedding and head left out."""
    rank, hidden = config["dflash_config"]["selector_rank"], config["hidden_size"]
    tables = {
        f"candidate_selector.{side}_codebook": (config["vocab_size"], rank)
        for side in ("predecessor", "successor")
    }
    projection = {"candidate_selector.hidden_projection.weight": (rank, hidden)}
    return backbone_shapes(config) | _convolution_shapes(config) | tables | projection


def lilicorr_shapes(config: Mapping[str, Any]) -> Shapes:
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
    shapes: Shapes = {
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
    return backbone_shapes(config) | _convolution_shapes(config) | head


def _convolution(hidden_size: int) -> dict[str, int]:
    group_size = math.gcd(hidden_size, CONV_GROUP_SIZE)
    return {"conv_kernel_size": CONV_KERNEL_SIZE, "conv_group_size": group_size}


def _convolution_shapes(config: Mapping[str, Any]) -> Shapes:
    section, hidden = config["dflash_config"], config["hidden_size"]
    taps = section.get("conv_kernel_size", 0)
    if not taps:
        return {}
    num_kernels = 2 * taps * (hidden // section["conv_group_size"])
    return {
        f"layers.{index}.{sublayer}_conv.{name}": shape
        for index in range(config["num_hidden_layers"])
        for sublayer in ("attention", "mlp")
        for name, shape in (
            ("base_kernel", (2, taps, hidden)),
            ("kernel_projection.weight", (num_kernels, hidden)),
        )
    }
