"""Convolutions of randomly initialised drafters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["convolution_keys", "convolution_shapes"]

KERNEL_SIZE, GROUP_SIZE = 2, 16


def convolution_keys(hidden_size: int) -> dict[str, int]:
    """Keys of `dflash_config` for groups that fit the width."""
    group_size = math.gcd(hidden_size, GROUP_SIZE)
    return {"conv_kernel_size": KERNEL_SIZE, "conv_group_size": group_size}


def convolution_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of the convolutions of a config in the Hugging Face form; none without any."""
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
