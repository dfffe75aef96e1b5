"""`cache_candidates` in Triton: one launch, a program a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.kernel import LOGIT_MAX, UNIT_BITS, point
from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.drafting.args import RowArgs, WordArgs, halves_of
from specreg.kernels.drafting.kernel import load_temperature, logits_cell, store_statistics
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["cache_candidates_triton"]

UNITS = tl.constexpr(2.0**UNIT_BITS.value)
UNIT = tl.constexpr(2.0**-UNIT_BITS.value)


class CandidateArgs(NamedTuple):
    """Ids and scores of each token's candidates, with their row strides."""

    ids: Tensor
    ids_stride: int
    scores: Tensor
    scores_stride: int


class KeptIds(NamedTuple):
    """Ids that the cache keeps, addressed like `LogitsCells`."""

    data: Tensor
    row_stride: int
    step_stride: int
    shard_idx: int


@triton.jit
def _first_of_each_id(ids, counts, lanes):
    """Which lanes of `counts` have no earlier lane of theirs with the same id."""
    is_same = (ids[:, None] == ids[None, :]) & counts[None, :] & (lanes[None, :] < lanes[:, None])
    return counts & (tl.max(is_same.to(tl.int32), 1) == 0)


@triton.jit
def _store_candidates(
    cells,
    kept,
    req,
    step,
    ids,
    scores,
    lanes,
    live,
    NUM_SHARDS: tl.constexpr,
    IS_DENSE: tl.constexpr,
):
    """Replace a cell's candidates if this rank owns the request."""
    is_owned, row = logits_cell(cells, req, step, NUM_SHARDS)
    if is_owned:
        stored = scores.to(cells.data.dtype.element_ty)
        _, to = logits_cell(kept, req, step, NUM_SHARDS)
        if IS_DENSE:
            before = tl.load(to + lanes, mask=live, other=-1)
            is_new = tl.max((before[:, None] == ids[None, :]).to(tl.int32), 1) == 0
            tl.store(row + before.to(tl.int64), float("-inf"), mask=(before >= 0) & is_new)
            tl.store(row + ids, stored, mask=ids >= 0)
        else:
            tl.store(row + lanes, stored, mask=live)
        tl.store(to + lanes, ids.to(tl.int32), mask=live)


@triton.jit
def cache_candidates_kernel(
    tokens,
    num_nans,
    statistics,
    cells,
    kept,
    candidates,
    rows,
    words,
    vocab_size,
    num_candidates,
    NUM_SHARDS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    IS_DENSE: tl.constexpr,
):
    """Program (token): draw one of its candidates; store them and their statistics if owned."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        tl.store(tokens + token, -1)
        return
    step = tl.load(rows.steps + token)
    lanes = tl.arange(0, NUM_LANES)
    live = lanes < num_candidates
    ids = tl.load(candidates.ids + token * candidates.ids_stride + lanes, mask=live, other=-1)
    ids = ids.to(tl.int64)
    scores = tl.load(
        candidates.scores + token * candidates.scores_stride + lanes,
        mask=live,
        other=float("-inf"),
    )
    if cells is not None:
        scores = scores.to(cells.data.dtype.element_ty).to(tl.float32)
    has_nan = tl.max((scores != scores).to(tl.int32), 0) > 0
    counts = (ids >= 0) & (ids < vocab_size) & (scores > float("-inf"))
    counts = _first_of_each_id(ids, counts, lanes)
    ids = tl.where(counts, ids, -1)
    scores = tl.where(counts, tl.minimum(scores, LOGIT_MAX), float("-inf"))
    peak = tl.max(scores, 0)
    is_empty = peak == float("-inf")

    chosen = tl.min(tl.where(counts & (scores == peak), ids, vocab_size), 0)
    if rows.temperature is not None:
        is_drawn, divisor, scale = load_temperature(rows.temperature, req)
        drawn_at = tl.where(is_drawn, divisor, 0.0)
        is_drawn = is_drawn & ~is_empty
        weights = tl.exp2((scores - peak) * scale) * UNITS
        units = tl.where(counts, weights, 0.0).to(tl.int64)
        total = tl.sum(units, 0)
        word, _, _, _ = random_words(
            tl.load(words.seeds + req), tl.load(words.positions + token), step, STREAM_DRAFT
        )
        cumulative = tl.sum(tl.where(ids[None, :] <= ids[:, None], units[None, :], 0), 1)
        drawn = point(total, word)
        is_hit = (cumulative > drawn) & (cumulative - units <= drawn)
        chosen = tl.where(is_drawn, tl.sum(tl.where(is_hit, ids, 0), 0), chosen)
    tl.store(tokens + token, tl.where(is_empty, 0, chosen))
    if num_nans is not None:
        tl.atomic_add(num_nans + req, 1, mask=has_nan | is_empty)
    if cells is not None:
        _store_candidates(cells, kept, req, step, ids, scores, lanes, live, NUM_SHARDS, IS_DENSE)
        logsumexp = tl.div_rn(peak, divisor) + tl.log(total.to(tl.float32) * UNIT)
        logsumexp = tl.where(is_drawn, logsumexp, 0.0)
        store_statistics(statistics, req, step, drawn_at, logsumexp, is_empty, NUM_SHARDS)


def cache_candidates_triton(
    ids: Tensor,
    scores: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    num_nans: Tensor | None,
) -> Tensor:
    """Launch one kernel on the current stream. No host synchronisation."""
    num_tokens, num_candidates = ids.shape
    tokens = torch.empty_like(idx_mapping)
    if num_tokens == 0:
        return tokens
    cells = statistics = kept = cache_key = None
    num_shards, is_dense = 1, False
    if cache is not None:
        assert cache.ids is not None
        cells, statistics, cache_key = halves_of(cache)
        num_shards, is_dense = cache.shard.num_shards, cache.layout is DraftLogitsLayout.DENSE
        row_stride, step_stride, _ = cache.ids.stride()
        kept = KeptIds(cache.ids, row_stride, step_stride, cache.shard.shard_idx)
    candidates = CandidateArgs(ids, ids.stride(0), scores, scores.stride(0))
    rows, words = RowArgs(idx_mapping, steps, temperature), WordArgs(positions, seeds)
    launch(
        cache_candidates_kernel,
        (num_tokens,),
        (
            tokens,
            num_nans,
            statistics,
            cells,
            kept,
            candidates,
            rows,
            words,
            vocab_size,
            num_candidates,
            num_shards,
            1 << (num_candidates - 1).bit_length(),
            is_dense,
        ),
        (
            cache_key,
            vocab_size,
            num_candidates,
            is_dense,
            specialisation(tokens, num_nans, kept, candidates, rows, words),
        ),
        num_warps=8 if num_candidates > 64 else 4 if num_candidates > 16 else 1,
    )
    return tokens
