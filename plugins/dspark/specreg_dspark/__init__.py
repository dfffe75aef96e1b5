"""Plugin: block drafters with a step-by-step bias of the token before (`method: dspark`)."""

from __future__ import annotations

from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_dspark.declarations import dspark_capabilities, dspark_needs, max_drafts
from specreg_dspark.hooks import DSparkHooks
from specreg_dspark.options import DSparkOptions
from specreg_dspark.recognition import is_dspark

__all__ = ["specreg_hookspecs", "specreg_speculators"]


@hookimpl
def specreg_hookspecs() -> list[type[DSparkHooks]]:
    return [DSparkHooks]


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="dspark",
            methods=("dspark",),
            factory="specreg_dspark.speculator:DSparkSpeculator",
            capabilities=dspark_capabilities,
            target_needs=dspark_needs,
            predicate=is_dspark,
            options_model=DSparkOptions,
            default_num_speculative_tokens=max_drafts,
            random_drafter="specreg_dspark.random_drafter:random_dspark",
            summary="a block over the target's states, then steps biased by the token before",
        )
    ]
