"""Randomly initialised DFlash2 drafters for a target of any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.testing import save_random_checkpoint
from specreg_dflash.convolution.random_drafter import convolution_keys, convolution_shapes
from specreg_dflash.random_drafter import backbone_shapes, hf_config

__all__ = ["random_dflash2"]

NUM_CANDIDATES = 4
RANK = 8


def random_dflash2(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write a DFlash2 drafter of two layers that shares the target's embedding and head.

    Args:
        directory: an empty one.
        target_config: the target's `config.json`.

    Returns:
        The speculative configuration that selects it.
    """
    config = hf_config(target_config, "DFlash2DraftModel")
    config["dflash_config"] |= convolution_keys(config["hidden_size"])
    config["dflash_config"] |= {"selector_rank": RANK, "selector_top_k": NUM_CANDIDATES}
    save_random_checkpoint(directory, config, _shapes(config))
    return {"method": "dflash", "model": str(directory)}


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a DFlash2 config in the Hugging Face form, embedding and head left out."""
    rank, hidden = config["dflash_config"]["selector_rank"], config["hidden_size"]
    tables = {
        f"candidate_selector.{side}_codebook": (config["vocab_size"], rank)
        for side in ("predecessor", "successor")
    }
    projection = {"candidate_selector.hidden_projection.weight": (rank, hidden)}
    return backbone_shapes(config) | convolution_shapes(config) | tables | projection
