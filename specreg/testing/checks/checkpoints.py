"""Checkpoints that do not fit are refused, in words that name what is wrong."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specreg.errors import SpecregError
from specreg.model_config import text_config_of
from specreg.testing.checks.result import Case, Check, failed, passed, verdict
from specreg.testing.lab import Lab
from specreg.testing.loading import load_speculator

__all__ = ["CHECKS"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
STRAY_TENSOR = "model.layers.0.stray_proj.weight"
STRAY_KEY = "norm_before_stray"
REQUIRED_KEYS = ("architectures", "model_type", "hidden_size", "vocab_size", "num_hidden_layers")
MAX_TENSORS = 6

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def _has_checkpoint(lab: Lab) -> Path | None:
    model = lab.subject.speculative.get("model")
    path = Path(str(model)) if model else None
    return path if path is not None and (path / WEIGHTS).is_file() else None


def tensors(lab: Lab) -> Iterator[Case]:
    """Missing, misshapen and superfluous tensors."""
    source = _has_checkpoint(lab)
    if source is None:
        yield passed("there is no checkpoint")
        return
    names = sorted(load_file(source / WEIGHTS))
    step = max(1, -(-len(names) // MAX_TENSORS))
    for name in dict.fromkeys([*names[::step], names[-1]]):
        if name not in lab.subject.optional_tensors:
            problem = _refusal(lab, source, partial(_remove, name), name)
            yield verdict(f"without {name}", problem)
    for name in (names[0], names[-1]):
        problem = _refusal(lab, source, partial(_grow, name), name)
        yield verdict(f"{name} with another shape", problem)
    problem = _refusal(lab, source, _add_stray_tensor, STRAY_TENSOR)
    yield verdict("with a tensor that nothing reads", problem)


def config_keys(lab: Lab) -> Iterator[Case]:
    """Missing keys are refused or change nothing; an unknown one is told."""
    source = _has_checkpoint(lab)
    if source is None:
        yield passed("there is no checkpoint")
        return
    config = json.loads((source / CONFIG).read_text())
    for key in REQUIRED_KEYS:
        if key in text_config_of(config):
            yield _missing_key(lab, source, key)
    problem = _refusal(lab, source, _add_stray_key, STRAY_KEY, may_warn=True)
    yield verdict("with an unknown key", problem)


def _missing_key(lab: Lab, source: Path, key: str) -> Case:
    name = f"without {key}"
    try:
        with _changed(lab, source, partial(_remove_key, key)) as broken:
            load_speculator(broken)
    except SpecregError:
        return passed(name)
    except Exception as error:
        return failed(name, f"{type(error).__name__}: {error}; allowed: a SpecregError")
    return passed(f"{name}: a default, or told by the tensors")


def _refusal(
    lab: Lab, source: Path, change: Change, name: str, *, may_warn: bool = False
) -> Iterator[str]:
    """What is wrong with how a changed checkpoint is received."""
    try:
        with _changed(lab, source, change) as broken:
            _, messages = load_speculator(broken)
    except SpecregError as error:
        if name not in str(error):
            yield f"the error does not name it: {error.what}; {error.got}"
    except Exception as error:
        yield f"{type(error).__name__}: {str(error)[:200]}; allowed: a SpecregError that names it"
    else:
        if not any(name in message for message in messages):
            yield f"it loads, and no {'warning' if may_warn else 'error or warning'} names {name}"


@contextmanager
def _changed(lab: Lab, source: Path, change: Change) -> Iterator[Lab]:
    """A copy of the checkpoint with a change, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "draft")
        shutil.copytree(source, directory)
        weights = load_file(directory / WEIGHTS)
        config = json.loads((directory / CONFIG).read_text())
        change(weights, config)
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(config))
        speculative = {**lab.subject.speculative, "model": str(directory)}
        yield Lab(replace(lab.subject, speculative=speculative), lab.tps)


def _remove(name: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config, weights[name]


def _remove_key(key: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del weights
    part = text_config_of(config)
    assert isinstance(part, dict)
    del part[key]


def _grow(name: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config
    weights[name] = torch.cat([weights[name], weights[name][:1]])


def _add_stray_tensor(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del config
    weights[STRAY_TENSOR] = torch.zeros(2, 2)


def _add_stray_key(weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    del weights
    config[STRAY_KEY] = True


CHECKS = (
    Check("checkpoint: missing, extra and misshapen tensors", tensors),
    Check("checkpoint: unknown and missing config keys", config_keys),
)
