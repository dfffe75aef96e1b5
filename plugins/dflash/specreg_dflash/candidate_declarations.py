"""What drafters that choose among a few candidates a step declare, from their config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.capabilities import (
    CacheDtype,
    Capabilities,
    DraftingStyle,
    DraftLogitsLayout,
)
from specreg.plugin import DraftSetup
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.dflash2_config import read_dflash2
from specreg_dflash.lilicorr_config import read_lilicorr

__all__ = [
    "dflash2_capabilities",
    "lilicorr_capabilities",
    "max_dflash2_drafts",
    "max_lilicorr_drafts",
]


def dflash2_capabilities(setup: DraftSetup) -> Capabilities:
    """Of DFlash2."""
    if not setup.draft_config:
        return _capabilities(None, None)
    config = read_dflash2(ConfigForm.of(setup.draft_config))
    return _capabilities(config.num_candidates, config.backbone.block_size - 1)


def lilicorr_capabilities(setup: DraftSetup) -> Capabilities:
    """Of LiLiCorr."""
    if not setup.draft_config:
        return _capabilities(None, None)
    config = read_lilicorr(ConfigForm.of(setup.draft_config))
    return _capabilities(config.num_candidates, config.backbone.block_size - 1)


def max_dflash2_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block of DFlash2. Raises `CheckpointError`."""
    return read_dflash2(ConfigForm.of(draft_config)).backbone.block_size - 1


def max_lilicorr_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block of LiLiCorr. Raises `CheckpointError`."""
    return read_lilicorr(ConfigForm.of(draft_config)).backbone.block_size - 1


def _capabilities(num_candidates: int | None, max_drafts: int | None) -> Capabilities:
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
