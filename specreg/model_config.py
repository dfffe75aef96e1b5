"""A model's `config.json`, read without its framework, and the few facts that planning needs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specreg.errors import CheckpointError
from specreg.known_models import KNOWN_MODELS

__all__ = ["dtype_of", "read_model_config", "text_config_of", "vocab_size_of"]


def read_model_config(model: str | None) -> Mapping[str, Any] | None:
    """The config of the model that `model` names.

    Args:
        model: a directory with a `config.json`, such a file itself, or the name of a known model.

    Returns:
        None when the name tells nothing here: no such path and no known model, or a directory whose
        weights carry their own config (GGUF).

    Raises:
        CheckpointError: the file cannot be read as a JSON object.
    """
    if not model:
        return None
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if os.path.isfile(path):
        return _read_json(Path(path))
    known = KNOWN_MODELS.get(model)
    return None if known is None else known.config


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "a model's config cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}; allowed: a JSON object in UTF-8",
            fix="repair the file, or name another checkpoint",
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            "a model's config is not an object",
            where=str(path),
            got=f"a JSON {type(config).__name__}; allowed: a JSON object",
            fix="repair the file, or name another checkpoint",
        )
    return config


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the text decoder: nested in multimodal and `speculators` configs."""
    for key in ("text_config", "transformer_layer_config"):
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return nested
    return config


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the vocabulary; None when the config does not say."""
    value = text_config_of(config).get("vocab_size", config.get("vocab_size"))
    return value if type(value) is int and value > 0 else None


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The dtype that the weights were saved in, by name; None when the config does not say."""
    for part in (text_config_of(config), config):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return None
