"""A speculator whose sampler, known only once loaded, writes every row."""

from __future__ import annotations

from specreg_example.speculator import SuffixCountsSpeculator

__all__ = ["FullCacheSpeculator"]


class FullCacheSpeculator(SuffixCountsSpeculator):
    """Says so honestly: the cache stays replicated."""

    def supports_batch_sharded_draft_logits(self) -> bool:
        return False
