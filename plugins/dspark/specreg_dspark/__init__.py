"""Plugin: DSpark."""

from __future__ import annotations

from specreg.plugin import SpeculatorSpec, hookimpl

__all__ = ["specreg_speculators"]


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return []
