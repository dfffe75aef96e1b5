"""The entry point `markov_sample`."""

from __future__ import annotations

from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.common.args import check_strides
from specreg.kernels.common.checks import FLOATS, check_tensor
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.op import check_drafts
from specreg.kernels.drafting.checks import check_matrix, check_vector, refuse_greedy_cache
from specreg.kernels.markov_sample.reference import markov_sample_reference

__all__ = ["markov_sample"]

OP = "markov_sample"


def markov_sample(
    base_logits: Tensor,
    anchors: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    w1: Tensor,
    w2: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    num_nans: Tensor | None = None,
    greedy: bool = False,
) -> Tensor:
    """Draw the K tokens of every request's proposal, each from logits that the one before biases.

    Tokens and cells are those of a loop over the steps that adds the bias
    `round(w2 @ w1[previous])` to the base logits, rounds the sum to their dtype and calls
    `draft_sample`; see there for what NaN, infinities, temperature 0, ties and rows without a logit
    come to. A token depends on neither the batch nor its owner. Does not synchronise with the host
    on a GPU, and may be captured in a CUDA graph.

    A GPU sums a bias in fp32 and the twin in double precision, so before rounding they differ as
    any two orders of summation do; whatever was drawn from is what is stored.

    Args:
        base_logits: `[num_reqs, K, width]`, fp32, bf16 or fp16, the last dimension contiguous,
            after the head's own scale and cap. Columns at or beyond `vocab_size` are ignored.
        anchors: int64 `[num_reqs]`, target id of the token before the first draft. One outside `w1`
            adds no bias.
        idx_mapping: int64 `[num_reqs]`, request state indices; -1 marks padding: nothing is read or
            written for it but its results, -1.
        positions: int64 `[num_reqs]`, position of the first draft; the others follow it.
        w1: `[num_ids, rank]`, fp32, bf16 or fp16, rows contiguous, by target id: at least
            `vocab_size` rows.
        w2: `[num_rows, rank]` in the dtype of `w1`, rows contiguous, by draft column: at least as
            many rows as columns are sampled from.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
        seeds: int64 `[max_num_seqs]` by slot.
        cache: where owned rows go, whole, in layout dense or draft_vocab, with at least K steps;
            None stores nothing. Written in place. Layout top_k is refused: candidates are drawn
            with `cache_candidates`.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]` as of `draft_sample`; None where draft columns are
            target ids.
        scale: what a bias is multiplied by.
        soft_cap: a bias becomes `soft_cap * tanh(bias / soft_cap)` first; None leaves it.
        num_nans: int32 `[max_num_seqs]` by slot, raised by one for each step with a NaN or without
            a logit above -inf. Written in place.
        greedy: take the argmax of every step whatever the temperature. Goes with no cache.

    Returns:
        int64 `[num_reqs, K]` target ids, -1 for padding.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit, a cache of another layout
            or with fewer steps, or `greedy` with a cache.
    """
    _check(
        base_logits,
        anchors,
        idx_mapping,
        positions,
        w1,
        w2,
        temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
    if greedy and cache is not None:
        refuse_greedy_cache(OP)
    if uses_triton(base_logits.device):
        from specreg.kernels.markov_sample.kernel import markov_sample_triton as implementation
    else:
        implementation = markov_sample_reference
    return implementation(
        base_logits,
        anchors,
        idx_mapping,
        positions,
        w1,
        w2,
        None if greedy else temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        scale=scale,
        soft_cap=soft_cap,
        num_nans=num_nans,
    )


def _check(
    base_logits: Tensor,
    anchors: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    w1: Tensor,
    w2: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    num_nans: Tensor | None,
) -> None:
    """Refuse arguments that do not fit. Reads no values, so it does not synchronise."""
    device = base_logits.device
    where = f"{OP}(base_logits)"
    fix = "pass the base logits of all steps: logits.view(num_reqs, K, -1)"
    check_tensor(
        where, base_logits, shape=(None, None, None), dtypes=FLOATS, device=device, fix=fix
    )
    num_reqs, num_steps, width = base_logits.shape
    is_packed = width == 1 or base_logits.stride(2) == 1
    check_strides(where, base_logits, is_packed, "stride 1 between columns")
    if num_steps == 0:
        raise TensorError(
            "there is no step to draft",
            where=where,
            got=f"{list(base_logits.shape)}; allowed: at least one step",
            fix=fix,
        )
    check_drafts(
        OP,
        base_logits[:, 0],
        idx_mapping,
        idx_mapping,  # there are no steps to check
        positions,
        temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
    check_vector(OP, "anchors", anchors, num_reqs, idx_mapping.dtype, device, "token a request")
    fix = "pass the tables of the Markov head, where the logits are: w1 by target id, w2 by column"
    check_matrix(OP, "w1", w1, FLOATS, fix, device=device)
    check_matrix(OP, "w2", w2, (w1.dtype,), fix, (None, w1.shape[1]), device)
    num_columns = min(width, vocab_size) if target_ids is None else target_ids.numel()
    if len(w1) < vocab_size or len(w2) < num_columns or w1.shape[1] == 0:
        raise TensorError(
            "the tables of the Markov head do not cover the vocabulary",
            where=f"{OP}(w1, w2)",
            got=f"w1 {list(w1.shape)}, w2 {list(w2.shape)}; allowed: a row of w1 for each of "
            f"{vocab_size} target ids, one of w2 for each of {num_columns} columns, rank 1 or more",
            fix=fix,
        )
    if cache is not None and cache.num_speculative_tokens < num_steps:
        raise TensorError(
            "the draft-logits cache has fewer steps than the proposal",
            where=f"{OP}(cache)",
            got=f"{cache.num_speculative_tokens} steps for {num_steps}; allowed: at least as many",
            fix="pass base logits of num_speculative_tokens steps",
        )
