"""Checkpoint directories: what is read, and what is refused with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError

TENSORS = {"layer.weight": torch.arange(6.0).view(2, 3), "norm.weight": torch.ones(3).half()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 7}')
    return tmp_path


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_is_read_by_name_and_on_demand(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    checkpoint = Checkpoint(directory)
    assert checkpoint.config["vocab_size"] == 7
    assert checkpoint.names == ("layer.weight", "norm.weight")
    assert "norm.weight" in checkpoint
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.shape("layer.weight") == (2, 3)
    assert torch.equal(checkpoint.load("layer.weight"), TENSORS["layer.weight"])
    assert checkpoint.load("norm.weight").dtype == torch.float16
    assert checkpoint.load("norm.weight", dtype=torch.float32).dtype == torch.float32


def test_shards_are_read_through_their_index(directory: Path) -> None:
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, directory / f"model-{i}.safetensors")
    save_file({"layer.weight": torch.zeros(1)}, directory / "stray.safetensors")
    write_index(directory, {name: f"model-{i}.safetensors" for i, name in enumerate(TENSORS)})
    checkpoint = Checkpoint(directory)
    assert [file.name for file in checkpoint.files] == [
        "model-0.safetensors",
        "model-1.safetensors",
    ]
    assert torch.equal(checkpoint.load("layer.weight"), TENSORS["layer.weight"])


def test_any_safetensors_serve_when_none_has_the_usual_name(directory: Path) -> None:
    save_file(TENSORS, directory / "drafter.safetensors")
    assert Checkpoint(directory).names == ("layer.weight", "norm.weight")


def test_pickled_weights_are_refused_with_the_way_out(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin(.|\n)*convert them"):
        Checkpoint(directory)


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        Checkpoint(directory)


def test_a_missing_config_or_directory_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1, 2]", "\x00"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config"):
        Checkpoint(tmp_path)


def test_a_missing_shard_is_named(directory: Path) -> None:
    save_file(TENSORS, directory / "model-0.safetensors")
    write_index(directory, {"a": "model-0.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"no model-1\.safetensors"):
        Checkpoint(directory)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(directory: Path, text: str) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index of the shards"):
        Checkpoint(directory)


def test_a_truncated_file_is_refused_by_name(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match=r"model\.safetensors(.|\n)*Git LFS"):
        _ = Checkpoint(directory).names


def test_a_missing_tensor_shows_the_nearest_name(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'layers\.weight'(.|\n)*layer\.weight"):
        Checkpoint(directory).load("layers.weight")


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    for name in ("a", "b"):
        save_file(TENSORS, directory / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="two files hold the same tensor"):
        _ = Checkpoint(directory).names
