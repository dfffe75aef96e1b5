"""What drafters of candidates declare."""

from __future__ import annotations

from specreg.capabilities import CacheDtype, Capabilities, DraftingStyle, DraftLogitsLayout

__all__ = ["candidate_capabilities"]


def candidate_capabilities(
    num_candidates: int | None = None, max_drafts: int | None = None
) -> Capabilities:
    """Of a drafter that walks over candidates.

    Args:
        num_candidates: candidates a draft; None while the config is unknown.
        max_drafts: drafts of a whole block; likewise.
    """
    return Capabilities(
        style=DraftingStyle.SEMI_AUTOREGRESSIVE,
        supports_probabilistic=True,
        honors_owner_mask=True,
        layouts=frozenset({DraftLogitsLayout.TOP_K, DraftLogitsLayout.DENSE}),
        # A candidate's score is the sum of two terms, and verification must see the same bits.
        cache_dtype=CacheDtype.FLOAT32,
        is_cuda_graph_safe=True,
        num_candidates=num_candidates,
        max_num_speculative_tokens=max_drafts,
    )
