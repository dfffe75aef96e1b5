"""Plugin: block drafters whose attention reads the target's states (`method: dflash`)."""

from __future__ import annotations

from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_dflash.declarations import backbone_needs, dflash_capabilities, max_drafts
from specreg_dflash.dflash2.declarations import dflash2_capabilities, max_dflash2_drafts
from specreg_dflash.lilicorr.declarations import lilicorr_capabilities, max_lilicorr_drafts
from specreg_dflash.xpress.config import xpress_capabilities, xpress_drafts
from specreg_dflash.xpress.options import XPressOptions

__all__ = ["specreg_speculators"]


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="dflash",
            methods=("dflash",),
            factory="specreg_dflash.speculator:DFlashSpeculator",
            capabilities=dflash_capabilities,
            target_needs=backbone_needs,
            architectures=("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel"),
            model_types=("dflash",),
            default_num_speculative_tokens=max_drafts,
            random_drafter="specreg_dflash.random_drafter:random_dflash",
            summary="a block of mask tokens over the target's states, filled in by one pass",
        ),
        SpeculatorSpec(
            name="dflash2",
            methods=("dflash", "dflash2"),
            factory="specreg_dflash.dflash2.speculator:DFlash2Speculator",
            capabilities=dflash2_capabilities,
            target_needs=backbone_needs,
            architectures=("DFlash2DraftModel", "DFlash2BeamDraftModel", "DFlash2Speculator"),
            model_types=("dflash2",),
            default_num_speculative_tokens=max_dflash2_drafts,
            random_drafter="specreg_dflash.dflash2.random_drafter:random_dflash2",
            summary="a DFlash block with convolutions; a walk over each row's best candidates",
        ),
        SpeculatorSpec(
            name="lilicorr",
            methods=("dflash", "lilicorr"),
            factory="specreg_dflash.lilicorr.speculator:LiLiCorrSpeculator",
            capabilities=lilicorr_capabilities,
            target_needs=backbone_needs,
            architectures=("LiLiCorrDraftModel",),
            model_types=("lilicorr",),
            default_num_speculative_tokens=max_lilicorr_drafts,
            random_drafter="specreg_dflash.lilicorr.random_drafter:random_lilicorr",
            summary="a DFlash block whose candidates are scored in sight of each other",
        ),
        SpeculatorSpec(
            name="xpress",
            methods=("dflash",),
            factory="specreg_dflash.xpress.speculator:XPressSpeculator",
            capabilities=xpress_capabilities,
            target_needs=backbone_needs,
            architectures=("Qwen3XPressModel", "XPressDraftModel", "XPressSpeculator"),
            model_types=("xpress",),
            options_model=XPressOptions,
            default_num_speculative_tokens=xpress_drafts,
            random_drafter="specreg_dflash.xpress.random_drafter:random_xpress",
            summary="a DFlash block whose tokens are refined together; greedy only",
        ),
    ]
