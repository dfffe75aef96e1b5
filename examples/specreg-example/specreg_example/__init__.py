"""Plugin: drafts from what followed the same tokens earlier (`method: suffix_counts`)."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle, TargetNeeds
from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_example.options import SuffixCountsOptions

__all__ = ["specreg_speculators"]


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="suffix_counts",
            methods=("suffix_counts",),
            factory="specreg_example.speculator:SuffixCountsSpeculator",
            capabilities=Capabilities(
                style=DraftingStyle.AUTOREGRESSIVE,
                supports_probabilistic=True,
                honors_owner_mask=True,
            ),
            target_needs=TargetNeeds(needs_token_history=True),
            options_model=SuffixCountsOptions,
            needs_checkpoint=False,
            summary="counts what followed the last two tokens earlier in the request",
        )
    ]
