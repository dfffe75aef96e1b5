"""The map from a reduced draft vocabulary to the target's: its checks and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.errors import TensorError

__all__ = ["check_target_ids", "target_to_draft_table"]


def check_target_ids(
    target_ids: Tensor | None,
    *,
    vocab_size: int,
    draft_vocab_size: int | None = None,
    device: torch.device | str,
) -> Tensor | None:
    """The map of a draft head's columns as ops take it. Reads it on the host: for load time only.

    Args:
        target_ids: integers `[num_draft_columns]`, the target id of each column; None where column
            and id are the same. Checkpoints often hold offsets: `target_ids = arange + offsets`.
        vocab_size: columns of the target's vocabulary.
        draft_vocab_size: columns that the speculator declares; None is as many as the target's.
        device: where it is wanted.

    Returns:
        int64 `[num_draft_columns]`; None where no map is needed: there is none, or it is the
        identity over the whole vocabulary.

    Raises:
        TensorError: a reduced vocabulary without a map, a map of another length, or ids that repeat
            or lie outside the target's vocabulary.
    """
    num_columns = vocab_size if draft_vocab_size is None else draft_vocab_size
    if target_ids is None:
        if num_columns == vocab_size:
            return None
        raise TensorError(
            "a reduced draft vocabulary has no map into the target's",
            where="target_ids",
            got=f"None for {num_columns} draft columns; allowed: one id below {vocab_size} a "
            "column",
            fix="load the map from the draft checkpoint; it cannot be guessed",
        )
    target_ids = target_ids.to(device, torch.int64)
    if draft_vocab_size is not None and target_ids.shape != (draft_vocab_size,):
        raise TensorError(
            "the map of a reduced draft vocabulary has another length",
            where="target_ids",
            got=f"{list(target_ids.shape)}; allowed: [{draft_vocab_size}], as the speculator "
            "declares draft_vocab_size",
            fix="pass one target id a column of the draft head, or correct the declaration",
        )
    ids, counts = torch.unique(target_ids, return_counts=True)
    offending = ids[(counts > 1) | (ids < 0) | (ids >= vocab_size)].tolist()
    if offending:
        raise TensorError(
            "a reduced draft vocabulary does not map into the target's",
            where="target_ids",
            got=f"{len(offending)} ids that repeat or lie outside, such as {offending[:8]}; "
            f"allowed: distinct ids below {vocab_size}",
            fix="pass the target id of each draft column; checkpoints often hold offsets to add",
        )
    is_identity = len(target_ids) == vocab_size and torch.equal(
        target_ids, torch.arange(vocab_size, device=device)
    )
    return None if is_identity else target_ids.contiguous()


def target_to_draft_table(target_ids: Tensor, vocab_size: int) -> Tensor:
    """int32 `[vocab_size]`, the draft column of each target id; -1 where there is none."""
    table = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    columns = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
    table[target_ids] = columns
    return table
