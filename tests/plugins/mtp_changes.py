"""Checkpoints of the families, with changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mtp_families import FAMILIES
from mtp_harness import Harness
from safetensors.torch import load_file, save_file

__all__ = [
    "SPECULATORS",
    "Change",
    "Config",
    "Weights",
    "both",
    "changed",
    "logits_of",
    "set_keys",
    "set_tensor",
    "without",
]

Weights = dict[str, torch.Tensor]
Config = dict[str, Any]
Change = Callable[[Weights, Config], None]

SPECULATORS = "speculators of qwen2"
PROMPT = (3, 9, 1, 14)


def changed(name: str, directory: Path, change: Change | None = None) -> dict[str, Any]:
    """A family's checkpoint with a change; the configuration that loads it."""
    FAMILIES[name].save(directory)
    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if change is not None:
        change(weights, config)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return {"method": "mtp", "model": str(directory)}


def set_tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    def change(weights: Weights, config: Config) -> None:
        del config
        weights[name] = torch.randn(shape).to(dtype)

    return change


def set_keys(**keys: Any) -> Change:
    def change(weights: Weights, config: Config) -> None:
        del weights
        part = config.get("transformer_layer_config", config)
        part.update(keys)

    return change


def both(first: Change, second: Change) -> Change:
    def change(weights: Weights, config: Config) -> None:
        first(weights, config)
        second(weights, config)

    return change


def without(name: str) -> Change:
    def change(weights: Weights, config: Config) -> None:
        del config, weights[name]

    return change


def logits_of(harness: Harness) -> torch.Tensor:
    return harness.prompt(PROMPT, 4).clone()
