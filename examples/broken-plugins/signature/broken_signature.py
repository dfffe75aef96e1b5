"""A plugin whose hook wants a configuration, which no hook gets."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle
from specreg.plugin import SpeculatorSpec, hookimpl


@hookimpl
def specreg_speculators(config: dict[str, str]) -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="wants_config",
            methods=("wants_config",),
            factory="broken_signature:make",
            capabilities=Capabilities(style=DraftingStyle.AUTOREGRESSIVE),
            needs_checkpoint=False,
        )
    ]
