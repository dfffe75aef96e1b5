"""The entry point `draft_sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.common.args import check_cache, check_strides
from specreg.kernels.common.checks import FLOATS, check_tensor
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import draft_sample_reference

__all__ = ["draft_sample"]

_BY_SLOT = {"temperature": torch.float32, "seeds": torch.int64, "num_nans": torch.int32}


def draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None = None,
    num_nans: Tensor | None = None,
    greedy: bool = False,
) -> Tensor:
    """Draw a draft token from each row of logits, and store the rows that this rank owns.

    With a cache, logits are rounded to its dtype first, on every rank and whoever owns the row, so
    that verification sees the distribution that the token was drawn from. NaN counts as -inf,
    logits above 2^100 as 2^100. Never returns an id of probability 0 or a column at or beyond
    `vocab_size`; ties of the argmax go to the lowest column. A row without a logit above -inf gives
    column 0, is counted in `num_nans`, and its cell stays empty. Does not synchronise with the host
    on a GPU.

    Args:
        logits: `[n, width]`, fp32, bf16 or fp16, rows contiguous. Columns at or beyond `vocab_size`
            are ignored; a narrower head has probability 0 beyond its width.
        idx_mapping: int64 `[n]`, request state index of each token; -1 marks padding: nothing is
            read or written for it but its result, -1.
        steps: int64 `[n]`, index of the token in its proposal, below `num_speculative_tokens`.
        positions: int64 `[n]`, position of the token being drafted, below 2^31.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
        seeds: int64 `[max_num_seqs]` by slot.
        cache: where owned rows go, whole; None stores nothing. Written in place.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]`, the target id of each draft column, injective and
            in range; the stored row is -inf in all other columns.
        num_nans: int32 `[max_num_seqs]` by slot, raised by one for each row with a NaN or without a
            logit above -inf. Written in place.
        greedy: take the argmax of every row whatever its temperature. Goes with no cache: such
            drafts are verified as one-hot.

    Returns:
        int64 `[n]` target ids, -1 for padding.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit, or `greedy` with a cache.
    """
    by_slot = {"temperature": temperature, "seeds": seeds}
    if num_nans is not None:
        by_slot["num_nans"] = num_nans
    by_token = {"idx_mapping": idx_mapping, "steps": steps, "positions": positions}
    _check(logits, by_token, by_slot, target_ids, vocab_size)
    if cache is not None:
        check_cache(
            "draft_sample(cache)",
            cache,
            vocab_size=vocab_size,
            max_num_seqs=len(temperature),
            device=logits.device,
        )
        if greedy:
            raise TensorError(
                "greedy drafts have no distribution to store",
                where="draft_sample(greedy, cache)",
                got="greedy=True with a cache; allowed: one of them",
                fix="pass cache=None, or leave greedy out and set temperatures to 0",
            )
    if uses_triton(logits.device):
        from specreg.kernels.draft_sample.kernel import draft_sample_triton as implementation
    else:
        implementation = draft_sample_reference
    return implementation(
        logits,
        idx_mapping,
        steps,
        positions,
        None if greedy else temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )


def _check(
    logits: Tensor,
    by_token: dict[str, Tensor],
    by_slot: dict[str, Tensor],
    target_ids: Tensor | None,
    vocab_size: int,
) -> None:
    device = logits.device
    check_tensor(
        "draft_sample(logits)",
        logits,
        shape=(None, None),
        dtypes=FLOATS,
        device=device,
        fix="pass one row of floating-point logits a token: logits.flatten(0, -2)",
    )
    num_tokens, width = logits.shape
    is_packed = width == 1 or logits.stride(1) == 1
    check_strides("draft_sample(logits)", logits, is_packed, "stride 1 between columns")
    most = min(width, vocab_size)
    num_columns = most if target_ids is None else target_ids.numel()
    if not 1 <= num_columns <= most:
        raise TensorError(
            "there is nothing to sample from",
            where="draft_sample(logits, vocab_size, target_ids)",
            got=f"{width} columns, vocab_size {vocab_size}, {num_columns} columns in use; allowed: "
            "at least 1, at most the columns of the logits and of the target",
            fix="pass the logits of the draft head and one target id a column of it",
        )
    for name, tensor in by_token.items():
        _check_vector(name, tensor, num_tokens, torch.int64, device, "value a row of logits")
    max_num_seqs = by_slot["seeds"].numel()
    for name, tensor in by_slot.items():
        _check_vector(name, tensor, max_num_seqs, _BY_SLOT[name], device, "value a slot")
    if target_ids is not None:
        _check_vector("target_ids", target_ids, num_columns, torch.int64, device, "id a column")


def _check_vector(
    name: str, tensor: Tensor, length: int, dtype: torch.dtype, device: torch.device, fix: str
) -> None:
    where = f"draft_sample({name})"
    check_tensor(
        where,
        tensor,
        shape=(length,),
        dtypes=(dtype,),
        device=device,
        fix=f"pass one {fix}, as {str(dtype).removeprefix('torch.')}, where the logits are",
    )
    check_strides(where, tensor, tensor.is_contiguous(), "contiguous")
