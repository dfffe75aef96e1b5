"""What a DFlash2 drafter declares, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.capabilities import Capabilities
from specreg.plugin import DraftSetup
from specreg_dflash.candidates.declarations import candidate_capabilities
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.dflash2.config import read_dflash2

__all__ = ["dflash2_capabilities", "max_dflash2_drafts"]


def dflash2_capabilities(setup: DraftSetup) -> Capabilities:
    """Of DFlash2."""
    if not setup.draft_config:
        return candidate_capabilities()
    config = read_dflash2(ConfigForm.of(setup.draft_config))
    return candidate_capabilities(config.num_candidates, config.backbone.block_size - 1)


def max_dflash2_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block. Raises `CheckpointError`."""
    return read_dflash2(ConfigForm.of(draft_config)).backbone.block_size - 1
