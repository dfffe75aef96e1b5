"""The draft-logits cache as one kernel argument, and its checks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.common.checks import FLOATS, check_tensor
from specreg.kernels.common.view import DraftLogitsView
from specreg.ownership import rows_per_rank

__all__ = ["CacheArgs", "cache_args", "check_cache", "check_strides"]


class CacheArgs(NamedTuple):
    """A dense `DraftLogitsView` as kernels take it: pointers, strides in elements, this rank.

    Statistics and states lie at `row * num_steps + step`.
    """

    logits: Tensor
    temperature: Tensor
    logsumexp: Tensor
    state: Tensor
    row_stride: int
    step_stride: int
    num_steps: int
    shard_idx: int


def cache_args(cache: DraftLogitsView) -> CacheArgs:
    """The kernel argument for a cache that `check_cache` has passed."""
    return CacheArgs(
        logits=cache.logits,
        temperature=cache.temperature,
        logsumexp=cache.logsumexp,
        state=cache.state,
        row_stride=cache.logits.stride(0),
        step_stride=cache.logits.stride(1),
        num_steps=cache.logits.shape[1],
        shard_idx=cache.shard.shard_idx,
    )


def check_cache(
    where: str,
    cache: DraftLogitsView,
    *,
    vocab_size: int,
    max_num_seqs: int,
    device: torch.device,
) -> None:
    """Refuse a cache that an op cannot address: its layout, vocabulary, shapes, dtypes, strides.

    Args:
        where: op and argument, such as `"draft_sample(cache)"`.
        cache: the argument.
        vocab_size: of the op.
        max_num_seqs: slots of the op's per-slot tensors, each of which must have its row.
        device: where its tensors must be.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    if cache.layout is not DraftLogitsLayout.DENSE or cache.vocab_size != vocab_size:
        raise TensorError(
            "the op cannot address this draft-logits cache",
            where=where,
            got=f"layout {cache.layout.value} for {cache.vocab_size} columns; allowed: "
            f"{DraftLogitsLayout.DENSE.value} for {vocab_size}",
            fix="pass a dense cache that was allocated for the op's vocab_size",
        )
    rows, num_steps, _ = cache.logits.shape
    if rows < rows_per_rank(max_num_seqs, cache.shard.num_shards):
        raise TensorError(
            "the draft-logits cache has no row for some slots",
            where=where,
            got=f"{rows} rows for {max_num_seqs} slots over {cache.shard.num_shards} shards; "
            f"allowed: at least {rows_per_rank(max_num_seqs, cache.shard.num_shards)}",
            fix="pass per-slot tensors of the max_num_seqs that the cache was allocated for",
        )
    fix = "pass DraftLogitsCache.view(), or tensors laid out as its attributes say"
    check_tensor(
        f"{where}.logits",
        cache.logits,
        shape=(rows, num_steps, vocab_size),
        dtypes=FLOATS,
        device=device,
        fix=fix,
    )
    for name, dtype in (
        ("temperature", torch.float32),
        ("logsumexp", torch.float32),
        ("state", torch.uint8),
    ):
        tensor: Tensor = getattr(cache, name)
        shape = (rows, num_steps)
        check_tensor(
            f"{where}.{name}", tensor, shape=shape, dtypes=(dtype,), device=device, fix=fix
        )
        check_strides(f"{where}.{name}", tensor, tensor.is_contiguous(), "a contiguous tensor")
    is_packed = cache.logits.stride(2) == 1 or vocab_size == 1
    check_strides(f"{where}.logits", cache.logits, is_packed, "stride 1 in the last dimension")


def check_strides(where: str, tensor: Tensor, is_fit: bool, allowed: str) -> None:
    """Refuse a tensor whose strides do not fit. Raises `TensorError`."""
    if not is_fit:
        raise TensorError(
            "a tensor's memory layout does not fit the op",
            where=where,
            got=f"strides {tensor.stride()}; allowed: {allowed}",
            fix="pass tensor.contiguous(), or slice rows and steps only",
        )
