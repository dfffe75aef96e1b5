"""The entry point `draft_sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.common.checks import FLOATS
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import draft_sample_reference
from specreg.kernels.drafting.checks import (
    check_matrix,
    check_vector,
    check_written_cache,
    refuse_greedy_cache,
)

__all__ = ["check_drafts", "draft_sample"]

LAYOUTS = frozenset({DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB})


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
        cache: where owned rows go, whole, in layout dense or draft_vocab; None stores nothing.
            Written in place.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]`, the target id of each draft column, injective and
            in range. A dense row is -inf in all other columns; one of layout draft_vocab holds the
            draft columns as they are, and goes with the map that the cache was allocated for.
        num_nans: int32 `[max_num_seqs]` by slot, raised by one for each row with a NaN or without a
            logit above -inf. Written in place.
        greedy: take the argmax of every row whatever its temperature. Goes with no cache: such
            drafts are verified as one-hot.

    Returns:
        int64 `[n]` target ids, -1 for padding.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit, or `greedy` with a cache.
    """
    check_drafts(
        "draft_sample",
        logits,
        idx_mapping,
        steps,
        positions,
        temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
    if greedy and cache is not None:
        refuse_greedy_cache("draft_sample")
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


def check_drafts(
    op: str,
    logits: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    num_nans: Tensor | None,
) -> None:
    """Refuse arguments that do not fit an op that draws from whole rows of draft logits.

    Reads no values, so it does not synchronise.

    Args:
        op: its name; the others are as of `draft_sample`.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    device, per_row, per_slot = logits.device, "value a row of logits", "value a slot"
    check_matrix(
        op,
        "logits",
        logits,
        FLOATS,
        "pass one row of floating-point logits a token: logits.flatten(0, -2)",
    )
    num_tokens, width = logits.shape
    most = min(width, vocab_size)
    num_columns = most if target_ids is None else target_ids.numel()
    if not 1 <= num_columns <= most:
        raise TensorError(
            "there is nothing to sample from",
            where=f"{op}(logits, vocab_size, target_ids)",
            got=f"{width} columns, vocab_size {vocab_size}, {num_columns} columns in use; allowed: "
            "at least 1, at most the columns of the logits and of the target",
            fix="pass the logits of the draft head and one target id a column of it",
        )
    check_vector(op, "idx_mapping", idx_mapping, num_tokens, torch.int64, device, per_row)
    check_vector(op, "steps", steps, num_tokens, torch.int64, device, per_row)
    check_vector(op, "positions", positions, num_tokens, torch.int64, device, per_row)
    max_num_seqs = seeds.numel()
    check_vector(op, "temperature", temperature, max_num_seqs, torch.float32, device, per_slot)
    check_vector(op, "seeds", seeds, max_num_seqs, torch.int64, device, per_slot)
    if num_nans is not None:
        check_vector(op, "num_nans", num_nans, max_num_seqs, torch.int32, device, per_slot)
    if target_ids is not None:
        check_vector(op, "target_ids", target_ids, num_columns, torch.int64, device, "id a column")
    if cache is None:
        return
    check_written_cache(
        f"{op}(cache)",
        cache,
        LAYOUTS,
        of_candidates=False,
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        device=device,
    )
    if cache.layout is DraftLogitsLayout.DRAFT_VOCAB:
        draft_vocab_size = cache.logits.shape[2]
        if target_ids is None or num_columns != draft_vocab_size:
            raise TensorError(
                "a cache of a reduced vocabulary needs the map that it was allocated for",
                where=f"{op}(target_ids)",
                got=f"{None if target_ids is None else num_columns} ids; allowed: "
                f"{draft_vocab_size}, one a column of the cache",
                fix="pass DraftLogitsCache.target_ids",
            )
