"""Filling a module from a checkpoint so that no tensor is dropped and no parameter left random."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError
from specreg.spelling import nearest

__all__ = ["Ignored", "load_weights", "module_bytes"]

logger = logging.getLogger(__name__)

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Ignored:
    """A tensor that a reader knows and does not need.

    Attributes:
        reason: one clause.
    """

    reason: str


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    rename: Callable[[str], str | Ignored | None],
    *,
    absent: Mapping[str, str] | None = None,
    file_name: Callable[[str], str] = str,
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str,
) -> None:
    """Give every parameter and buffer of a module its tensor of the checkpoint.

    Floating-point tensors are converted to `dtype`; integers keep theirs. Modules are made on the
    meta device: a parameter that gets no tensor stays there and cannot be computed with.

    Args:
        module: its state dict names what is wanted.
        checkpoint: where tensors are.
        rename: from a name in the file to one of the state dict; `Ignored` for a tensor that is
            not needed; None for one that belongs to somebody else, such as the target.
        absent: names of the state dict that the file may lack, each with the reason.
        file_name: from a name of the state dict to the file's, for errors.
        dtype: of the loaded parameters.
        dtypes: of those that are kept in another one, by name of the state dict.
        device: of the loaded parameters.

    Raises:
        CheckpointError: a tensor that nothing reads, two for one parameter, another shape, one in a
            quantised dtype, ids that are no integers, or a parameter without a tensor; it names
            them.
    """
    state = module.state_dict(keep_vars=True)
    absent, dtypes = absent or {}, dtypes or {}
    found: dict[str, Tensor] = {}
    for name in checkpoint.names:
        key = rename(name)
        if key is None:
            continue
        if isinstance(key, Ignored):
            logger.debug("%s: %s is not read: %s", checkpoint.directory, name, key.reason)
            continue
        if key not in state:
            raise _error(
                checkpoint,
                "a tensor of the checkpoint has no place in the drafter",
                f"{name!r} (as {key!r}), {list(checkpoint.shape(name))}; nearest: "
                f"{nearest(key, state)}",
            )
        if key in found:
            raise _error(
                checkpoint,
                "two tensors of the checkpoint are for one parameter",
                f"{name!r} and another one as {key!r}; allowed: one",
            )
        if checkpoint.shape(name) != tuple(state[key].shape):
            raise _error(
                checkpoint,
                "a tensor of the checkpoint has another shape than its config says",
                f"{name!r} {list(checkpoint.shape(name))}; allowed: {list(state[key].shape)}",
            )
        tensor = checkpoint.load(name, device=device)
        if state[key].is_floating_point() and tensor.dtype not in PLAIN_DTYPES:
            raise _error(
                checkpoint,
                "a tensor of the checkpoint is quantised, and nothing dequantises it",
                f"{name!r} in {tensor.dtype}; allowed: {', '.join(map(str, PLAIN_DTYPES))}",
            )
        is_inexact = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        if not state[key].is_floating_point() and is_inexact:
            raise _error(
                checkpoint,
                "a tensor of the checkpoint holds no integers where ids belong",
                f"{name!r} in {tensor.dtype}; allowed: an integer dtype",
            )
        found[key] = _as(tensor, state[key], dtypes.get(key, dtype))
        del tensor  # or it would still be there while the next one is read
    if missing := sorted(state.keys() - found.keys() - absent.keys()):
        shapes = ", ".join(f"{file_name(name)} {list(state[name].shape)}" for name in missing[:5])
        raise _error(
            checkpoint,
            "the checkpoint does not fill every parameter of the drafter",
            f"{len(missing)} without a tensor: {shapes}; the file has {len(checkpoint.names)} "
            "tensors",
        )
    module.load_state_dict(found, strict=False, assign=True)
    module.requires_grad_(False)


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, those on the meta device left out."""
    tensors = {*module.parameters(), *module.buffers()}
    return sum(tensor.nbytes for tensor in tensors if not tensor.is_meta)


def _as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that is wanted, as parameter or buffer like its place."""
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor


def _error(checkpoint: Checkpoint, what: str, got: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=str(checkpoint.directory),
        got=got,
        fix="use a complete checkpoint whose config.json belongs to it",
    )
