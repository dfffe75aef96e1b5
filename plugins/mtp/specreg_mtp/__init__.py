"""Plugin: MTP modules and the assistants of Gemma 4 (`mtp`, and what families call it)."""

from __future__ import annotations

from specreg.plugin import SpeculatorSpec, hookimpl
from specreg_mtp.gemma4 import GEMMA4
from specreg_mtp.specs import MTP, MULTI_MODULE_MTP

__all__ = ["specreg_speculators"]


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [MTP, MULTI_MODULE_MTP, GEMMA4]
