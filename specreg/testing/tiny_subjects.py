"""The kit's own target, and drafters of its shape."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specreg.testing.tiny_models import save_tiny_model

__all__ = ["perturbed_copy", "save_kit_target"]

# Prime: no number of ranks divides it. Narrow: a few thousand draws tell distributions apart.
KIT_VOCAB_SIZE = 17
KIT_NUM_LAYERS = 2
# Weights of this spread give distributions that are neither flat nor one-hot.
KIT_INITIALIZER_RANGE = 0.2


def save_kit_target(
    directory: str | os.PathLike[str], kind: str = "llama", **overrides: Any
) -> Path:
    """Write the target that the kit proves speculators with; returns the directory.

    Args:
        directory: made if missing.
        kind: a key of `specreg.testing.tiny_models.TINY_MODELS`.
        overrides: config keys that replace the kit's own; None drops a key.
    """
    fields: dict[str, Any] = {
        "vocab_size": KIT_VOCAB_SIZE,
        "num_hidden_layers": KIT_NUM_LAYERS,
        "initializer_range": KIT_INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return save_tiny_model(kind, directory, **{**fields, **overrides})


def perturbed_copy(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], scale: float = 0.1
) -> Path:
    """Write a model that is like another one, but not equal: a drafter that is sometimes right.

    Args:
        source: checkpoint directory with one `model.safetensors`.
        directory: made if missing.
        scale: standard deviation of the noise on a matrix, in units of the matrix's own.
    """
    source, directory = Path(source), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(source / "model.safetensors")
    for name in sorted(weights):
        weight = weights[name]
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + (scale * weight.float().std() * noise).to(weight.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return directory
