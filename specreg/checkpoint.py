"""Reading Hugging Face checkpoint directories: `config.json` and safetensors, never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specreg.errors import CheckpointError
from specreg.model_config import read_model_config
from specreg.spelling import nearest

__all__ = ["Checkpoint"]

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """A checkpoint directory; tensors are read one at a time, when they are asked for.

    Args:
        directory: holds `config.json` and either `model.safetensors`, shards with their
            `model.safetensors.index.json`, or any other `*.safetensors`.

    Attributes:
        directory: as given.
        config: the parsed `config.json`.
        files: the safetensors files, in order of name.

    Raises:
        CheckpointError: a file is missing or unreadable, or the weights are pickled.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.config: Mapping[str, Any] = _read_config(self.directory)
        self._index = _read_index(self.directory)
        self.files = _find_files(self.directory, self._index)
        self._handles: dict[Path, Any] = {}
        self._file_of: Mapping[str, Path] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._files_by_name()))

    def __contains__(self, name: str) -> bool:
        return name in self._files_by_name()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header alone. Raises `CheckpointError`."""
        return tuple(self._handle_of(name).get_slice(name).get_shape())

    def load(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Read a tensor into memory of its own.

        Args:
            name: of the tensor.
            dtype: wanted; None keeps the file's.
            device: where it goes.

        Raises:
            CheckpointError: there is no such tensor.
        """
        tensor: Tensor = self._handle_of(name).get_tensor(name)
        return tensor.to(device=device, dtype=dtype)

    def _handle_of(self, name: str) -> Any:
        files = self._files_by_name()
        if name not in files:
            raise CheckpointError(
                "a tensor is missing",
                where=str(self.directory),
                got=f"no {name!r} among {len(files)} tensors; nearest: {nearest(name, files)}",
                fix="use a complete checkpoint of the architecture that config.json names",
            )
        return self._open(files[name])

    def _files_by_name(self) -> Mapping[str, Path]:
        if self._file_of is None:
            file_of: dict[str, Path] = {}
            for path in self.files:
                names: list[str] = self._open(path).keys()
                for name in names:
                    if name in file_of:
                        raise CheckpointError(
                            "two files hold the same tensor",
                            where=f"{file_of[name]}, {path}",
                            got=f"{name!r} twice; allowed: once",
                            fix=f"remove the superfluous file, or add {INDEX_FILE}",
                        )
                    file_of[name] = path
            self._file_of = file_of
        return self._file_of

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    "a weights file cannot be read",
                    where=str(path),
                    got=f"{type(error).__name__}: {error}; allowed: a complete safetensors file",
                    fix="download it again; a Git LFS pointer is not the file itself",
                ) from error
        return self._handles[path]


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / CONFIG_FILE
    config = read_model_config(os.fspath(path)) if path.is_file() else None
    if config is None:
        raise CheckpointError(
            "the directory holds no checkpoint",
            where=str(path),
            got="no such file" if directory.is_dir() else "no such directory",
            fix="point to a directory with config.json and safetensors",
        )
    return config


def _read_index(directory: Path) -> Mapping[str, str] | None:
    """Tensor name -> file name, where shards come with an index."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the index of the shards cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}; allowed: a JSON object with 'weight_map'",
            fix="download it again",
        ) from error


def _find_files(directory: Path, index: Mapping[str, str] | None) -> tuple[Path, ...]:
    if index is not None:
        files = sorted({directory / file for file in index.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                "shards of the checkpoint are missing",
                where=str(directory / INDEX_FILE),
                got=f"no {', '.join(missing[:5])}; allowed: all {len(files)} files of the index",
                fix="download the missing files",
            )
        return tuple(files)
    single = directory / SINGLE_FILE
    if single.is_file():
        return (single,)
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return tuple(files)
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
    raise CheckpointError(
        "the checkpoint has no safetensors",
        where=str(directory),
        got=f"pickled weights: {', '.join(pickled[:5])}; allowed: *.safetensors"
        if pickled
        else "no weights; allowed: *.safetensors",
        fix="convert them to safetensors: unpickling runs code from the file"
        if pickled
        else "download the weights into the directory",
    )
