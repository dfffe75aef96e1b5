"""Tiny checkpoints on disk, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specreg.testing.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    return save_tiny_model("llama", tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: some of its drafts are accepted, and some are not."""
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("draft"), seed=0)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = weight + 0.1 * weight.std() * noise if weight.dim() > 1 else weight
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models only wait for each other's threads."""
    torch.set_num_threads(1)
