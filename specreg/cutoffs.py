"""Cut-offs of the target distribution: top_k, then top_p, then min_p.

With `y = logits / temperature` over `vocab_size` columns, a column is kept when all of these hold:

    top_k: y is at least the top_k-th largest y (columns that tie with it are kept too)
    top_p: the softmax of what top_k kept, summed over the columns before it in descending order
           of y (ascending id among equals), is below top_p
    min_p: softmax(y) >= min_p * max softmax(y)

These are the rules of transformers' logits warpers, which leave the order among equals at the top_p
cut open. The most probable column is always kept. Cutting sets columns to -inf and changes no other
value: temperature is applied once, by whoever draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.common.checks import FLOATS, check_tensor
from specreg.kernels.common.reference import clean_logits_reference

__all__ = ["apply_cutoffs"]

# Columns looked at first. The rest is sorted only for a row whose top_p or top_k reaches further.
PREFIX = 1024

# Rows worked on at a time. A fixed number, so that a row's result cannot depend on its neighbours
# through the shape of a reduction, and scratch does not grow with the batch.
ROWS_ON_CPU = 1
ROWS_ON_DEVICE = 8


def apply_cutoffs(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
) -> Tensor:
    """Set the columns to -inf that the requests' cut-offs remove.

    Rows of requests without cut-offs, of greedy requests (temperature 0) and of padding are
    returned as they are, and so is NaN. Synchronises with the host on a device, to learn which rows
    need work.

    Args:
        logits: `[num_logits, >= vocab_size]`, fp32, bf16 or fp16, before temperature. Not written
            to.
        expanded_idx_mapping: int64 `[num_logits]`, request state index of each row; -1 is padding.
        temperature: fp32 `[max_num_seqs]`.
        top_k: int64 `[max_num_seqs]`; 0 keeps all.
        top_p: fp32 `[max_num_seqs]`; 1 keeps all.
        min_p: fp32 `[max_num_seqs]`; 0 keeps all.
        vocab_size: columns that are tokens; those behind are left alone.

    Returns:
        `logits` itself when no row needs work, else a copy in the same dtype.

    Raises:
        TensorError: a shape, dtype or device that does not fit.
    """
    _check(logits, expanded_idx_mapping, temperature, top_k, top_p, min_p, vocab_size)
    slots = expanded_idx_mapping.clamp(min=0)
    has_cutoffs = (top_k > 0) & (top_k < vocab_size) | (top_p < 1) | (min_p > 0)
    needs_work = (expanded_idx_mapping >= 0) & (has_cutoffs & (temperature > 0))[slots]
    rows = needs_work.nonzero().squeeze(1)
    if not rows.numel():
        return logits
    result = logits.clone()
    size = ROWS_ON_CPU if logits.device.type == "cpu" else ROWS_ON_DEVICE
    for group in torch.split(rows, size):
        group = torch.cat([group, group[-1:].expand(size - len(group))])
        slot = slots[group]
        raw = logits[group, :vocab_size]
        scores = clean_logits_reference(raw) / temperature[slot, None]
        kept = _kept(scores, top_k[slot, None], top_p[slot, None], min_p[slot, None])
        result[group, :vocab_size] = raw.masked_fill(~(kept | raw.isnan()), -torch.inf)
    return result


def _kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which columns of `scores [rows, vocab_size]` survive; the parameters are `[rows, 1]`."""
    num_columns = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k, num_columns).clamp(max=num_columns)
    peak = scores.amax(1, keepdim=True)
    weights = (scores - peak).exp_()
    for width in (min(PREFIX, num_columns), num_columns):
        largest = scores.topk(width, dim=1).values
        kth = largest.gather(1, (top_k - 1).clamp(max=width - 1))
        kth = torch.where(top_k < num_columns, kth, -torch.inf)
        nucleus = weights.where(scores >= kth, 0.0).sum(1, keepdim=True)
        descending = (largest - peak).exp_().where(largest >= kth, 0.0)
        before = torch.nn.functional.pad(descending.cumsum(1)[:, :-1], (1, 0))
        num_kept = (before < top_p * nucleus).sum(1, keepdim=True).clamp_(min=1)
        is_settled = (top_k <= width) | (top_k == num_columns)
        is_settled &= (num_kept < width) | (top_p >= 1)
        if width == num_columns or bool(is_settled.all()):
            break
    kept = scores >= kth
    last = largest.gather(1, num_kept - 1)
    ties_kept = num_kept - (largest > last).sum(1, keepdim=True)
    ties = scores == last
    within = (scores > last) | (ties & (ties.cumsum(1) <= ties_kept))
    return kept & (within | (top_p >= 1)) & (weights >= min_p.clamp(max=1))


def _check(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    vocab_size: int,
) -> None:
    device = logits.device
    check_tensor(
        "apply_cutoffs(logits)",
        logits,
        shape=(None, max(vocab_size, logits.shape[-1])),
        dtypes=FLOATS,
        device=device,
        fix=f"pass logits with at least vocab_size={vocab_size} columns",
    )
    check_tensor(
        "apply_cutoffs(expanded_idx_mapping)",
        expanded_idx_mapping,
        shape=(logits.shape[0],),
        dtypes=(torch.int64,),
        device=device,
        fix="pass the request state index of each logits row",
    )
    for name, parameter, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
    ):
        check_tensor(
            f"apply_cutoffs({name})",
            parameter,
            shape=(temperature.shape[0],),
            dtypes=(dtype,),
            device=device,
            fix="pass one value a request slot",
        )
