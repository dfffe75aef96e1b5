"""`markov_sample` in torch: the specification, and what CPU users run."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import draft_sample_reference

__all__ = ["markov_bias_reference", "markov_sample_reference"]

CHUNK_ELEMENTS = 2**21  # of W2 in double precision at a time


def markov_bias_reference(
    previous: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    dtype: torch.dtype,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """What the previous tokens add to the logits of the next ones.

    Sums are in double precision and rounded once, so they depend on neither batch nor order.

    Args:
        previous: int64 `[n]`, target ids; one outside `w1` adds nothing.
        w1: `[num_ids, rank]`, fp32, bf16 or fp16.
        w2: `[num_columns, rank]` in the same dtype.
        dtype: of the logits.
        scale, soft_cap: as of `markov_sample`.

    Returns:
        `[n, num_columns]` in `dtype`.
    """
    is_known = (previous >= 0) & (previous < len(w1))
    rows = w1[torch.where(is_known, previous, 0)].double().masked_fill(~is_known[:, None], 0.0)
    num_columns, rank = w2.shape
    bias = rows.new_empty((len(previous), num_columns), dtype=dtype)
    chunk = max(1, CHUNK_ELEMENTS // rank)
    for start in range(0, num_columns, chunk):
        bias[:, start : start + chunk] = rows @ w2[start : start + chunk].double().T
    if scale != 1.0 or soft_cap is not None:
        exact = bias.float()
        if soft_cap is not None:
            exact = soft_cap * torch.tanh(exact / soft_cap)
        bias = (exact * scale).to(dtype)
    return bias


def markov_sample_reference(
    base_logits: Tensor,
    anchors: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    w1: Tensor,
    w2: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    scale: float,
    soft_cap: float | None,
    num_nans: Tensor | None,
) -> Tensor:
    """The torch twin; arguments as of `markov_sample`, where `temperature` None means greedy.

    Runs on any device; asks the host for sizes that depend on `idx_mapping`.
    """
    num_reqs, num_steps, width = base_logits.shape
    num_columns = min(width, vocab_size) if target_ids is None else len(target_ids)
    tokens = idx_mapping.new_full((num_reqs, num_steps), -1)
    live = (idx_mapping >= 0).nonzero().squeeze(1)
    slots, first, previous = idx_mapping[live], positions[live], anchors[live]
    for step in range(num_steps):
        bias = markov_bias_reference(
            previous,
            w1,
            w2[:num_columns],
            dtype=base_logits.dtype,
            scale=scale,
            soft_cap=soft_cap,
        )
        previous = draft_sample_reference(
            base_logits[live, step, :num_columns] + bias,
            slots,
            torch.full_like(slots, step),
            first + step,
            temperature,
            seeds,
            cache,
            vocab_size=vocab_size,
            target_ids=target_ids,
            num_nans=num_nans,
        )
        tokens[live, step] = previous
    return tokens
