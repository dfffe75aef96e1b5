"""Plugin: block drafters whose attention reads the target's states (`method: dflash`)."""

from __future__ import annotations

from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_dflash.declarations import backbone_needs, dflash_capabilities, max_drafts
from specreg_dflash.xpress_config import xpress_capabilities, xpress_drafts
from specreg_dflash.xpress_options import XPressOptions

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
            architectures=("DFlashDraftModel", "DFlashSpeculator"),
            model_types=("dflash",),
            default_num_speculative_tokens=max_drafts,
            random_drafter="specreg_dflash.random_drafter:random_dflash",
            summary="a block of mask tokens over the target's states, filled in by one pass",
        ),
        SpeculatorSpec(
            name="xpress",
            methods=("dflash",),
            factory="specreg_dflash.xpress:XPressSpeculator",
            capabilities=xpress_capabilities,
            target_needs=backbone_needs,
            architectures=("Qwen3XPressModel", "XPressDraftModel", "XPressSpeculator"),
            model_types=("xpress",),
            options_model=XPressOptions,
            default_num_speculative_tokens=xpress_drafts,
            random_drafter="specreg_dflash.random_drafter:random_xpress",
            summary="a DFlash block whose tokens are refined together; greedy only",
        ),
    ]
