"""Which of the target's layers an assistant's layers read. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specreg.capabilities import KVLayerSpec
from specreg.errors import CheckpointError
from specreg.model_config import text_config_of
from specreg.nn.kv_specs import kv_specs_from_config
from specreg_mtp.gemma4_config import FULL, SLIDING, AssistantConfig

__all__ = ["SharedLayer", "last_owners", "shared_layers"]


@dataclass(frozen=True)
class SharedLayer:
    """A layer of the target, and the keys and values that it holds."""

    index: int
    spec: KVLayerSpec


def shared_layers(
    config: AssistantConfig, target_config: Mapping[str, Any]
) -> dict[str, SharedLayer]:
    """The target's layer for each layer type of the assistant: the last one with own keys.

    Args:
        config: of the assistant.
        target_config: the target's `config.json`.

    Raises:
        CheckpointError: the target has no such layer, or one of another geometry.
    """
    owners = last_owners(target_config)
    for kind in sorted(set(config.layer_types)):
        if kind not in owners:
            raise CheckpointError(
                "the target has no layer whose keys and values an assistant's layer could read",
                where=f"{config.where}, layer type {kind!r}",
                got=f"layers with keys of their own are {', '.join(sorted(owners)) or 'none'} in "
                f"the target; allowed: {kind} among them",
                fix="use the assistant that was trained for this target",
            )
        _check_geometry(config, kind, owners[kind])
    return {kind: owners[kind] for kind in config.layer_types}


def last_owners(target_config: Mapping[str, Any]) -> dict[str, SharedLayer]:
    """The last layer of each layer type with own keys: those before the layers that share."""
    specs = kv_specs_from_config(target_config)
    num_shared = text_config_of(target_config).get("num_kv_shared_layers") or 0
    return {
        FULL if spec.sliding_window is None else SLIDING: SharedLayer(index, spec)
        for index, spec in enumerate(specs[: len(specs) - num_shared])
    }


def _check_geometry(config: AssistantConfig, kind: str, layer: SharedLayer) -> None:
    spec, head_dim = layer.spec, config.head_dims[kind]
    own = f"{config.num_heads} heads of {head_dim}"
    window = spec.sliding_window
    if kind == SLIDING:
        own += f" with a window of {config.sliding_window}"
    fits = (
        spec.head_dim == head_dim
        and spec.value_head_dim in (None, head_dim)
        and config.num_heads % spec.num_kv_heads == 0
        and (window is None or config.sliding_window <= window)
    )
    if not fits:
        raise CheckpointError(
            "an assistant's heads do not fit the keys and values that they would read",
            where=f"{config.where}, {kind} layers; layer {layer.index} of the target",
            got=f"{own}; allowed: a multiple of {spec.num_kv_heads} heads of {spec.head_dim}"
            + (f", with a window of at most {window}" if window is not None else ""),
            fix="use the assistant that was trained for this target",
        )
