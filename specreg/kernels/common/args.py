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

__all__ = ["NO_CACHE", "CacheArgs", "cache_args", "check_cache", "check_strides"]


class CacheArgs(NamedTuple):
    """A `DraftLogitsView` as kernels take it: pointers, strides in elements, this rank.

    Statistics and states lie at `row * num_steps + step`. `target_to_draft` is there in layout
    `draft_vocab` alone and `ids` in layout `top_k` alone, so kernels read a cell by which of the
    two is None; `ids` also come with a dense cache where `cache_args` is asked for them.
    """

    logits: Tensor
    temperature: Tensor
    logsumexp: Tensor
    state: Tensor
    row_stride: int
    step_stride: int
    num_steps: int
    shard_idx: int
    width: int = 0
    target_to_draft: Tensor | None = None
    ids: Tensor | None = None
    ids_row_stride: int = 0
    ids_step_stride: int = 0


# What kernels get without a cache: `state` is None. Triton 3.6 cannot ask a tuple that holds a None
# whether it is one.
NO_CACHE = CacheArgs(*[None] * 4, *[0] * 5)  # type: ignore[arg-type]


def cache_args(cache: DraftLogitsView, *, with_ids: bool = False) -> CacheArgs:
    """The kernel argument for a cache that `check_cache` has passed.

    Args:
        cache: the view.
        with_ids: pass the candidates' ids of a dense cache too, for those who clear them.
    """
    ids = cache.ids if with_ids or cache.layout is DraftLogitsLayout.TOP_K else None
    row_stride, step_stride, _ = cache.logits.stride()
    ids_row_stride, ids_step_stride, _ = (0, 0, 0) if ids is None else ids.stride()
    return CacheArgs(
        logits=cache.logits,
        temperature=cache.temperature,
        logsumexp=cache.logsumexp,
        state=cache.state,
        row_stride=row_stride,
        step_stride=step_stride,
        num_steps=cache.logits.shape[1],
        shard_idx=cache.shard.shard_idx,
        width=cache.logits.shape[2],
        target_to_draft=cache.target_to_draft,
        ids=ids,
        ids_row_stride=ids_row_stride,
        ids_step_stride=ids_step_stride,
    )


def check_cache(
    where: str,
    cache: DraftLogitsView,
    *,
    vocab_size: int,
    max_num_seqs: int,
    device: torch.device,
    layouts: frozenset[DraftLogitsLayout] = frozenset({DraftLogitsLayout.DENSE}),
) -> None:
    """Refuse a cache that an op cannot address: its layout, vocabulary, shapes, dtypes, strides.

    Args:
        where: op and argument, such as `"draft_sample(cache)"`.
        cache: the argument.
        vocab_size: of the op.
        max_num_seqs: slots of the op's per-slot tensors, each of which must have its row.
        device: where its tensors must be.
        layouts: those that the op can address.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    if cache.layout not in layouts or cache.vocab_size != vocab_size:
        names = " or ".join(sorted(layout.value for layout in layouts))
        raise TensorError(
            "the op cannot address this draft-logits cache",
            where=where,
            got=f"layout {cache.layout.value} for {cache.vocab_size} columns; allowed: "
            f"{names} for {vocab_size}",
            fix="pass a cache that was allocated for the op's vocab_size in a layout that it takes",
        )
    rows, num_steps, width = cache.logits.shape
    if rows < rows_per_rank(max_num_seqs, cache.shard.num_shards):
        raise TensorError(
            "the draft-logits cache has no row for some slots",
            where=where,
            got=f"{rows} rows for {max_num_seqs} slots over {cache.shard.num_shards} shards; "
            f"allowed: at least {rows_per_rank(max_num_seqs, cache.shard.num_shards)}",
            fix="pass per-slot tensors of the max_num_seqs that the cache was allocated for",
        )
    cells = (rows, num_steps)
    is_dense = cache.layout is DraftLogitsLayout.DENSE
    _check_part(where, cache, "logits", (*cells, vocab_size if is_dense else None), device)
    for name in ("temperature", "logsumexp", "state"):
        _check_part(where, cache, name, cells, device)
    if cache.layout is DraftLogitsLayout.DRAFT_VOCAB:
        _check_part(where, cache, "target_to_draft", (vocab_size,), device)
    if cache.layout is DraftLogitsLayout.TOP_K or cache.ids is not None:
        num_candidates = width if cache.layout is DraftLogitsLayout.TOP_K else None
        _check_part(where, cache, "ids", (*cells, num_candidates), device)


_DTYPES = {
    "logits": FLOATS,
    "temperature": (torch.float32,),
    "logsumexp": (torch.float32,),
    "state": (torch.uint8,),
    "ids": (torch.int32,),
    "target_to_draft": (torch.int32,),
}


def _check_part(
    where: str,
    cache: DraftLogitsView,
    name: str,
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Refuse one tensor of a cache. Rows and steps of logits and ids may have any strides."""
    tensor: Tensor | None = getattr(cache, name)
    where = f"{where}.{name}"
    fix = "pass DraftLogitsCache.view(), or tensors laid out as its attributes say"
    if tensor is None:
        raise TensorError(
            "a draft-logits cache lacks a tensor of its layout",
            where=where,
            got=f"None; allowed: a tensor in layout {cache.layout.value}",
            fix=fix,
        )
    check_tensor(where, tensor, shape=shape, dtypes=_DTYPES[name], device=device, fix=fix)
    if name in ("logits", "ids"):
        is_packed = tensor.stride(2) == 1 or tensor.shape[2] == 1
        check_strides(where, tensor, is_packed, "stride 1 in the last dimension")
    else:
        check_strides(where, tensor, tensor.is_contiguous(), "a contiguous tensor")


def check_strides(where: str, tensor: Tensor, is_fit: bool, allowed: str) -> None:
    """Refuse a tensor whose strides do not fit. Raises `TensorError`."""
    if not is_fit:
        raise TensorError(
            "a tensor's memory layout does not fit the op",
            where=where,
            got=f"strides {tensor.stride()}; allowed: {allowed}",
            fix="pass tensor.contiguous(), or slice rows and steps only",
        )
