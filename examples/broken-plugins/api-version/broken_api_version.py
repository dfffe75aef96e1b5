"""A plugin for an interface that this specreg does not speak yet."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle
from specreg.plugin import SpeculatorSpec, hookimpl


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="from_the_future",
            methods=("from_the_future",),
            factory="broken_api_version:make",
            capabilities=Capabilities(style=DraftingStyle.AUTOREGRESSIVE),
            needs_checkpoint=False,
            api_version=1_000,
        )
    ]
