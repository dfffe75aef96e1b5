"""Drafters with random weights: what runs, and is measured, before a trained one exists."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specreg.errors import ConfigError, PluginError
from specreg.model_config import read_model_config
from specreg.registry import Registry, get_registry
from specreg.runtime.models import resolve_model
from specreg.specs import NamedFactory, SpeculatorSpec
from specreg.testing.registered import registered_spec

__all__ = ["make_random_drafter", "save_random_checkpoint", "save_random_drafter"]

# Standard deviation of a matrix, in units of 1 / sqrt(its inputs); of a vector around its neutral
# value. Chosen so that logits are neither flat nor one-hot, and that no weight may be forgotten.
MATRIX_SPREAD = 1.1
VECTOR_SPREAD = 0.2


def save_random_drafter(
    name: str,
    directory: str | os.PathLike[str],
    target: str,
    registry: Registry | None = None,
) -> dict[str, Any]:
    """Write a randomly initialised drafter whose shape fits a target.

    Args:
        name: of an installed speculator, as `specreg list` prints it.
        directory: where to write; made if missing.
        target: a Hugging Face checkpoint directory, or a known name.
        registry: where to look; None is what is installed.

    Returns:
        The speculative configuration that runs it.

    Raises:
        ConfigError: no such speculator, or one that makes no random drafters.
        CheckpointError: there is no such target.
        PluginError: its `random_drafter` cannot be imported, or returns something else.
    """
    spec = registered_spec(name, registry or get_registry())
    if spec.random_drafter is None:
        raise ConfigError(
            f"speculator {name!r} makes no random drafters",
            where=f"SpeculatorSpec {name!r}, random_drafter",
            got="None; allowed: an import string",
            fix="name another speculator, or let the plugin declare one",
        )
    config = read_model_config(str(resolve_model(target))) or {}
    return make_random_drafter(spec, Path(directory), config)


def make_random_drafter(
    spec: SpeculatorSpec, directory: Path, target_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Call a spec's `random_drafter`; see `save_random_drafter`."""
    assert spec.random_drafter is not None
    directory.mkdir(parents=True, exist_ok=True)
    make = NamedFactory(spec.name, spec.random_drafter).load_factory()
    speculative = make(directory, target_config)
    if not isinstance(speculative, dict):
        raise PluginError(
            "a random drafter comes without its configuration",
            where=f"SpeculatorSpec {spec.name!r}, random_drafter {spec.random_drafter!r}",
            got=f"{type(speculative).__name__}; allowed: a dict, the speculative configuration",
            fix="return the configuration that selects the drafter",
        )
    return speculative


def save_random_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    integers: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Path:
    """Write `config.json` and fp32 `model.safetensors` with random weights.

    Matrices are drawn with a spread of about one over the root of their inputs; vectors lie around
    0 when their name ends in `bias`, and around 1 otherwise.

    Args:
        directory: made if missing.
        config: the `config.json`.
        shapes: of each tensor by name.
        integers: tensors that are not drawn, such as maps of a vocabulary.
        seed: of the weights. The global generator is left as it was.

    Returns:
        The directory.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in sorted(shapes.items())}
    tensors |= integers or {}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    return directory


def _random(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    noise = torch.randn(tuple(shape), generator=generator)
    spread = MATRIX_SPREAD * shape[-1] ** -0.5 if len(shape) > 1 else VECTOR_SPREAD
    is_scale = len(shape) == 1 and not name.endswith("bias")
    return noise.mul_(spread).add_(float(is_scale))
