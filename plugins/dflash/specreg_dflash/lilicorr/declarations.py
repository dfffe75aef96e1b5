"""What a LiLiCorr drafter declares, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.capabilities import Capabilities
from specreg.plugin import DraftSetup
from specreg_dflash.candidates.declarations import candidate_capabilities
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.lilicorr.config import read_lilicorr

__all__ = ["lilicorr_capabilities", "max_lilicorr_drafts"]


def lilicorr_capabilities(setup: DraftSetup) -> Capabilities:
    """Of LiLiCorr."""
    if not setup.draft_config:
        return candidate_capabilities()
    config = read_lilicorr(ConfigForm.of(setup.draft_config))
    return candidate_capabilities(config.num_candidates, config.backbone.block_size - 1)


def max_lilicorr_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block. Raises `CheckpointError`."""
    return read_lilicorr(ConfigForm.of(draft_config)).backbone.block_size - 1
