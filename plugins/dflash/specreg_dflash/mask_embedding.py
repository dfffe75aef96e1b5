"""An embedding for mask rows that lies beside the weights."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specreg.errors import CheckpointError
from specreg_dflash.backbone_config import BackboneConfig

__all__ = ["MASK_EMBEDDING", "MASK_TOKEN", "read_mask_embedding"]

MASK_EMBEDDING = "mask_embedding"
MASK_TOKEN = "mask_token_id"


def read_mask_embedding(directory: str | os.PathLike[str], config: BackboneConfig) -> Tensor | None:
    """The tensor `mask_embedding` of the file of this name; None where there is no such file.

    The file may hold an integer `mask_token_id` too, which is then held against the config's.

    Args:
        directory: of the checkpoint.
        config: of the drafter.

    Returns:
        `[hidden_size]`, on the CPU.

    Raises:
        CheckpointError: a pickled file, one that holds something else, or one for another token.
    """
    path = Path(directory) / f"{MASK_EMBEDDING}.safetensors"
    pickled = path.with_suffix(".pt")
    if not path.is_file():
        if pickled.is_file():
            raise CheckpointError(
                "the embedding of mask rows is pickled",
                where=str(pickled),
                got=f"a pickle; allowed: {path.name}, with a tensor {MASK_EMBEDDING!r}",
                fix="convert it to safetensors: unpickling runs code from the file",
            )
        return None
    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _error(path, f"{type(error).__name__}: {str(error)[:200]}", config) from error
    embedding, token = held.get(MASK_EMBEDDING), held.get(MASK_TOKEN)
    if embedding is None or embedding.numel() != config.shape.hidden_size:
        shapes = {name: list(tensor.shape) for name, tensor in held.items()}
        raise _error(path, f"tensors {shapes}", config)
    if token is not None and token.tolist() not in (config.mask_token_id, [config.mask_token_id]):
        raise _error(path, f"an embedding of token {token.tolist()}", config)
    return embedding.flatten()


def _error(path: Path, got: str, config: BackboneConfig) -> CheckpointError:
    return CheckpointError(
        "the embedding of mask rows cannot be used",
        where=str(path),
        got=f"{got}; allowed: a tensor {MASK_EMBEDDING!r} of {config.shape.hidden_size} elements, "
        f"and {MASK_TOKEN!r} {config.mask_token_id} or none",
        fix="use the file that belongs to the weights, or remove it",
    )
