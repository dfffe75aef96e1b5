"""DFlash: all drafts from one pass, each drawn by itself."""

from __future__ import annotations

from torch import Tensor

from specreg.speculator import DraftOutput
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.block_speculator import BlockSpeculator
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.declarations import read_fill_in

__all__ = ["DFlashSpeculator"]


class DFlashSpeculator(BlockSpeculator):
    """Mask row j predicts the token that stands at its own position."""

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        return read_fill_in(form)

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Draw every draft from its own row's logits; row 0 is not scored."""
        del anchors
        assert self.sampler is not None
        logits = self.backbone.score(hidden[:, 1:])
        return DraftOutput(self.sampler.sample_block(logits, self.draft_positions(block)))
