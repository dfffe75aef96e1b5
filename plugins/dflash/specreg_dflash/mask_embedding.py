"""An embedding for mask rows that lies beside the weights."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
from torch import Tensor

from specreg.errors import CheckpointError
from specreg_dflash.backbone_config import BackboneConfig

__all__ = ["MASK_EMBEDDING_FILE", "read_mask_embedding"]

MASK_EMBEDDING_FILE = "mask_embedding.pt"


def read_mask_embedding(directory: str | os.PathLike[str], config: BackboneConfig) -> Tensor | None:
    """The vector of `mask_embedding.pt`, on the CPU; None where there is no such file.

    The file is unpickled with nothing but tensors and plain containers allowed.

    Args:
        directory: of the checkpoint.
        config: of the drafter.

    Returns:
        `[hidden_size]`.

    Raises:
        CheckpointError: a file that holds something else, or is for another mask token.
    """
    path = Path(directory) / MASK_EMBEDDING_FILE
    if not path.is_file():
        return None
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _error(path, f"{type(error).__name__}: {str(error)[:200]}", config) from error
    token = config.mask_token_id
    if isinstance(held, dict):
        token = held.get("mask_token_id", token)
        held = held.get("embedding")
    if not isinstance(held, Tensor) or held.numel() != config.shape.hidden_size:
        got = f"shape {list(held.shape)}" if isinstance(held, Tensor) else type(held).__name__
        raise _error(path, got, config)
    if token != config.mask_token_id:
        raise _error(path, f"an embedding of token {token}", config)
    return held.flatten()


def _error(path: Path, got: str, config: BackboneConfig) -> CheckpointError:
    return CheckpointError(
        "the embedding of mask rows cannot be used",
        where=str(path),
        got=f"{got}; allowed: a tensor of {config.shape.hidden_size} elements, or a dict of "
        f"'embedding' and 'mask_token_id' {config.mask_token_id}",
        fix="use the file that belongs to the weights, or remove it",
    )
