"""A plugin that takes the name and the method of `specreg-example`."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle
from specreg.plugin import SpeculatorSpec, hookimpl


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="suffix_counts",
            methods=("suffix_counts",),
            factory="broken_duplicate:make",
            capabilities=Capabilities(style=DraftingStyle.AUTOREGRESSIVE),
            needs_checkpoint=False,
        )
    ]
