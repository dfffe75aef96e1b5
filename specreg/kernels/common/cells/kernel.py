"""Triton device helpers that read cells of the draft-logits cache, a `CacheArgs`.

Their torch twins are in `specreg.kernels.common.cells.reference`. Which layout it is, is known at
compile time: the tensors that it lacks are None.
"""

import triton
import triton.language as tl

from specreg.kernels.common.kernel import clean_logits

__all__ = ["candidates_of", "cell_columns", "cell_element", "cell_logits", "statistics_of"]


@triton.jit
def statistics_of(cache, row, step):
    """Offset of a cell's temperature, logsumexp and state."""
    return row * cache.num_steps + step


@triton.jit
def _logits_of(cache, row, step):
    return cache.logits + row * cache.row_stride + step.to(tl.int64) * cache.step_stride


@triton.jit
def _ids_of(cache, row, step):
    return cache.ids + row * cache.ids_row_stride + step.to(tl.int64) * cache.ids_step_stride


@triton.jit
def cell_logits(cache, row, step, columns, first, vocab_size, SIZE: tl.constexpr):
    """Cleaned fp32 logits of a cell at `columns`, which lie in `first .. first + SIZE - 1`.

    `row` (int64) and `step` are scalars and the row is this rank's.
    """
    logits = _logits_of(cache, row, step)
    if cache.ids is not None:
        ids = _ids_of(cache, row, step)
        x = tl.full(columns.shape, float("-inf"), tl.float32)
        for i in range(cache.width):
            token = tl.load(ids + i)
            if (token >= first) & (token < first + SIZE):
                x = tl.where(columns == token, tl.load(logits + i).to(tl.float32), x)
    elif cache.target_to_draft is not None:
        # Nothing is known of where a gather reads; the compiler then gives a warp the first
        # dimension, which transposed is that of the columns.
        at = columns
        if len(columns.shape) == 2:
            at = tl.trans(columns)
        at = tl.load(cache.target_to_draft + at, mask=at < vocab_size, other=-1)
        x = tl.load(logits + at, mask=at >= 0, other=float("-inf"))
        if len(columns.shape) == 2:
            x = tl.trans(x)
    else:
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
    return clean_logits(x)


@triton.jit
def cell_element(cache, row, step, token, mask, NUM_CANDIDATES: tl.constexpr):
    """Cleaned fp32 logit of one token of a cell, all scalars; -inf where `mask` is False.

    `NUM_CANDIDATES` is a power of two at or above the cache's width; only `top_k` uses it.
    """
    logits = _logits_of(cache, row, step)
    if cache.ids is not None:
        candidate = tl.arange(0, NUM_CANDIDATES)
        live = candidate < tl.where(mask, cache.width, 0)
        ids = tl.load(_ids_of(cache, row, step) + candidate, mask=live, other=-1)
        found = live & (ids == token)
        x = tl.load(logits + candidate, mask=found, other=float("-inf"))
        x = tl.max(clean_logits(x), 0)
    elif cache.target_to_draft is not None:
        at = tl.load(cache.target_to_draft + token, mask=mask, other=-1)
        x = clean_logits(tl.load(logits + at, mask=at >= 0, other=float("-inf")))
    else:
        x = clean_logits(tl.load(logits + token, mask=mask, other=float("-inf")))
    return x


@triton.jit
def candidates_of(cache, row, steps, mask, NUM_CANDIDATES: tl.constexpr):
    """Ids and cleaned fp32 logits `[steps, NUM_CANDIDATES]` of cells in layout `top_k`.

    `steps` and `mask` are vectors. Ids are -1 and logits -inf where there is no candidate.
    """
    candidate = tl.arange(0, NUM_CANDIDATES)[None, :]
    live = mask[:, None] & (candidate < cache.width)
    ids = tl.load(_ids_of(cache, row, steps)[:, None] + candidate, mask=live, other=-1)
    at = _logits_of(cache, row, steps)[:, None] + candidate
    return ids, clean_logits(tl.load(at, mask=ids >= 0, other=float("-inf")))


@triton.jit
def cell_columns(cache, row, step, columns):
    """Logits of a cell at `columns` of its own, as stored; -inf where there is no candidate."""
    live = columns < cache.width
    if cache.ids is not None:
        ids = tl.load(_ids_of(cache, row, step) + columns, mask=live, other=-1)
        live = live & (ids >= 0)
    return tl.load(_logits_of(cache, row, step) + columns, mask=live, other=float("-inf"))
