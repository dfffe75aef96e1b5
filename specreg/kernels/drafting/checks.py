"""What entry points that draw drafts refuse. The accepting path is short: it runs every step."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.common.args import check_cache, check_strides
from specreg.kernels.common.checks import check_tensor
from specreg.kernels.common.view import DraftLogitsView

__all__ = ["check_matrix", "check_vector", "check_written_cache", "refuse_greedy_cache"]


def check_matrix(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    fix: str,
    shape: tuple[int | None, int | None] = (None, None),
    device: torch.device | None = None,
) -> None:
    """Refuse anything but a matrix of `dtypes` whose rows are contiguous. Raises `TensorError`."""
    device = tensor.device if device is None else device
    where = f"{op}({name})"
    check_tensor(where, tensor, shape=shape, dtypes=dtypes, device=device, fix=fix)
    is_packed = tensor.shape[1] == 1 or tensor.stride(1) == 1
    check_strides(where, tensor, is_packed, "stride 1 between columns")


def check_vector(
    op: str,
    name: str,
    tensor: Tensor,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> None:
    """Refuse anything but a contiguous vector.

    Args:
        op, name: the op and its argument.
        tensor: the argument.
        length, dtype, device: what it must have.
        what: one element of it, such as `"value a slot"`.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    if (
        tensor.dtype is dtype
        and tensor.shape == (length,)
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        return
    where, dtype_name = f"{op}({name})", str(dtype).removeprefix("torch.")
    check_tensor(
        where,
        tensor,
        shape=(length,),
        dtypes=(dtype,),
        device=device,
        fix=f"pass one {what}, as {dtype_name}, where the logits are",
    )
    check_strides(where, tensor, tensor.is_contiguous(), "contiguous")


def check_written_cache(
    where: str,
    cache: DraftLogitsView,
    layouts: frozenset[DraftLogitsLayout],
    *,
    of_candidates: bool,
    vocab_size: int,
    max_num_seqs: int,
    device: torch.device,
) -> None:
    """Refuse a cache that an op cannot write. What passed once passes again without being read.

    Args:
        where: op and argument.
        cache: the argument.
        layouts: those that the op writes.
        of_candidates: whether the op writes candidates, whose ids a cache keeps, or whole rows.
        vocab_size, max_num_seqs, device: of the op's other arguments.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    passed: set[object] = cache.__dict__.setdefault("_passed", set())
    key = (layouts, of_candidates, vocab_size, max_num_seqs, device)
    if key in passed:
        return
    check_cache(
        where,
        cache,
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        device=device,
        layouts=layouts,
    )
    if of_candidates != (cache.ids is not None):
        kinds = {True: "candidates, with their ids", False: "whole rows, without ids"}
        raise TensorError(
            "a cache of candidates and one of whole rows are not written alike",
            where=f"{where}.ids",
            got=f"a cache of {kinds[not of_candidates]}; allowed: one of {kinds[of_candidates]}",
            fix="sample candidates with sample_candidates and all columns with sample; what a "
            "speculator does follows from Capabilities.num_candidates",
        )
    passed.add(key)


def refuse_greedy_cache(op: str) -> None:
    """Raises `TensorError`: greedy drafts with a cache."""
    raise TensorError(
        "greedy drafts have no distribution to store",
        where=f"{op}(greedy, cache)",
        got="greedy=True with a cache; allowed: one of them",
        fix="pass cache=None, or leave greedy out and set temperatures to 0",
    )
