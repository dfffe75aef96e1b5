"""The entry point `cache_candidates`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels.cache_candidates.reference import (
    MAX_CANDIDATES,
    cache_candidates_reference,
)
from specreg.kernels.common.checks import INDICES
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.drafting.checks import (
    check_matrix,
    check_vector,
    check_written_cache,
    refuse_greedy_cache,
)

__all__ = ["cache_candidates"]

LAYOUTS = frozenset({DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K})


def cache_candidates(
    ids: Tensor,
    scores: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    num_nans: Tensor | None = None,
    greedy: bool = False,
) -> Tensor:
    """Draw a draft token from each row of candidates, and store the rows that this rank owns.

    With a cache, scores are rounded to its dtype first, as in `draft_sample`; the plan gives a
    drafter of candidates fp32 in every layout, so that nothing is rounded and tokens do not depend
    on the layout. Candidates outside the vocabulary, with a NaN or -inf for a score, or with the id
    of an earlier one are absent. Scores above 2^100 count as 2^100; ties of the argmax go to the
    smallest id. A row without a candidate gives token 0, is counted in `num_nans`, and its cell
    stays empty. Does not synchronise with the host on a GPU.

    Args:
        ids: int32 or int64 `[n, k]`, target ids, rows contiguous; k at most 128.
        scores: fp32 `[n, k]`, logits before temperature, rows contiguous.
        idx_mapping, steps, positions, temperature, seeds: as in `draft_sample`.
        cache: where owned rows go, in layout dense or top_k with the ids of k candidates; None
            stores nothing. Written in place.
        vocab_size: columns of the target's vocabulary.
        num_nans: int32 `[max_num_seqs]` by slot, raised by one for each row with a NaN or without a
            candidate. Written in place.
        greedy: take the argmax of every row whatever its temperature; goes with no cache.

    Returns:
        int64 `[n]` target ids, -1 for padding.

    Raises:
        TensorError: shapes, dtypes, devices or strides that do not fit, more candidates than 128 or
            than the cache keeps, or `greedy` with a cache.
    """
    op = "cache_candidates"
    device, per_row, per_slot = ids.device, "value a row of candidates", "value a slot"
    fix = "pass one row of candidates a token: the ids and scores of a top-k, flattened"
    check_matrix(op, "ids", ids, INDICES, fix)
    num_tokens, num_candidates = ids.shape
    shape = (num_tokens, num_candidates)
    check_matrix(op, "scores", scores, (torch.float32,), fix, shape, device)
    if not 1 <= num_candidates <= MAX_CANDIDATES:
        raise TensorError(
            "the op cannot compare this many candidates",
            where="cache_candidates(ids)",
            got=f"{num_candidates} candidates; allowed: 1 to {MAX_CANDIDATES}",
            fix="score fewer candidates, or sample all columns with draft_sample",
        )
    check_vector(op, "idx_mapping", idx_mapping, num_tokens, torch.int64, device, per_row)
    check_vector(op, "steps", steps, num_tokens, torch.int64, device, per_row)
    check_vector(op, "positions", positions, num_tokens, torch.int64, device, per_row)
    max_num_seqs = seeds.numel()
    check_vector(op, "temperature", temperature, max_num_seqs, torch.float32, device, per_slot)
    check_vector(op, "seeds", seeds, max_num_seqs, torch.int64, device, per_slot)
    if num_nans is not None:
        check_vector(op, "num_nans", num_nans, max_num_seqs, torch.int32, device, per_slot)
    if cache is not None:
        check_written_cache(
            "cache_candidates(cache)",
            cache,
            LAYOUTS,
            of_candidates=True,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            device=device,
        )
        assert cache.ids is not None
        if cache.ids.shape[2] != num_candidates:
            raise TensorError(
                "the draft-logits cache keeps another number of candidates",
                where="cache_candidates(cache).ids",
                got=f"{cache.ids.shape[2]} a cell; allowed: {num_candidates}, as the ids have",
                fix="declare Capabilities.num_candidates as many as the speculator scores, and pad "
                "short rows with id -1",
            )
        if greedy:
            refuse_greedy_cache(op)
    if uses_triton(device):
        from specreg.kernels.cache_candidates.kernel import (
            cache_candidates_triton as implementation,
        )
    else:
        implementation = cache_candidates_reference
    return implementation(
        ids,
        scores,
        idx_mapping,
        steps,
        positions,
        None if greedy else temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        num_nans=num_nans,
    )
