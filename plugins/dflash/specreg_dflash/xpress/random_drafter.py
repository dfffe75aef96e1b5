"""Randomly initialised XPress drafters for a target of any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.testing import save_random_checkpoint
from specreg_dflash.random_drafter import backbone_shapes, hf_config

__all__ = ["random_xpress"]

RANK = 16


def random_xpress(directory: Path, target_config: Mapping[str, Any]) -> dict[str, Any]:
    """Write an XPress drafter with a refiner of a small rank; as `random_dflash`."""
    config = hf_config(target_config, "Qwen3XPressModel")
    block_size = config["block_size"]
    config |= {
        "xpress_block_size": block_size,
        "xpress_rank": RANK,
        "xpress_mlp_hidden": 2 * RANK,
        "xpress_num_passes": 4,
    }
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes = backbone_shapes(config)
    head: dict[str, tuple[int, ...]] = {
        "w1.weight": (vocab_size, RANK),
        "w2.weight": (vocab_size, RANK),
        "down_h.weight": (RANK, hidden),
        "down_g.weight": (RANK, hidden),
        "in_proj.weight": (RANK, 3 * RANK),
        "mix.L": (RANK, block_size, block_size),
        "mlp.gate_proj.weight": (2 * RANK, RANK),
        "mlp.up_proj.weight": (2 * RANK, RANK),
        "mlp.down_proj.weight": (RANK, 2 * RANK),
    }
    shapes |= {f"xpress_head.{name}": shape for name, shape in head.items()}
    save_random_checkpoint(directory, config, shapes)
    return {"method": "dflash", "model": str(directory)}
