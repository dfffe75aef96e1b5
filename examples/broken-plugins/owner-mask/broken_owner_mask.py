"""A plugin that claims to honour the owner mask and writes past it."""

from __future__ import annotations

from dataclasses import replace

import specreg_example

from specreg.plugin import SpeculatorSpec, hookimpl


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    (base,) = specreg_example.specreg_speculators()
    factory = "broken_owner_mask_speculator:CarelessSpeculator"
    return [replace(base, name="careless", methods=("careless",), factory=factory)]
