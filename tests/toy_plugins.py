"""Plugins for tests, as objects: what a module with hook functions is, without a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specreg.capabilities import Capabilities, DraftingStyle, DraftLogitsLayout
from specreg.plugin import (
    DraftWatermarkerFactory,
    PolicyRule,
    RejectionSamplerFactory,
    SpeculatorSpec,
    hookimpl,
)

__all__ = ["ToyPlugin", "capabilities", "spec"]


def capabilities(**changes: Any) -> Capabilities:
    """Those of a speculator that can do everything that sharding asks for."""
    facts: dict[str, Any] = {
        "style": DraftingStyle.AUTOREGRESSIVE,
        "supports_probabilistic": True,
        "honors_owner_mask": True,
        "layouts": frozenset({DraftLogitsLayout.DENSE}),
    }
    return Capabilities(**(facts | changes))


def spec(name: str = "toy", /, **changes: Any) -> SpeculatorSpec:
    """A speculator of this name that serves the method of this name."""
    facts: dict[str, Any] = {
        "name": name,
        "methods": (name,),
        "factory": "toy_module:make",
        "capabilities": capabilities(),
        "needs_checkpoint": False,
    }
    return SpeculatorSpec(**(facts | changes))


class ToyPlugin:
    """A plugin whose distribution is called `name`."""

    def __init__(
        self,
        *specs: SpeculatorSpec,
        name: str = "toy-dist",
        rules: Iterable[PolicyRule] = (),
        rejection_samplers: Iterable[RejectionSamplerFactory] = (),
        draft_watermarkers: Iterable[DraftWatermarkerFactory] = (),
    ) -> None:
        self.__name__ = name
        self.specs, self.rules = specs, rules
        self.rejection_samplers = rejection_samplers
        self.draft_watermarkers = draft_watermarkers

    @hookimpl
    def specreg_speculators(self) -> Iterable[SpeculatorSpec]:
        return self.specs

    @hookimpl
    def specreg_policy_rules(self) -> Iterable[PolicyRule]:
        return self.rules

    @hookimpl
    def specreg_rejection_samplers(self) -> Iterable[RejectionSamplerFactory]:
        return self.rejection_samplers

    @hookimpl
    def specreg_draft_watermarkers(self) -> Iterable[DraftWatermarkerFactory]:
        return self.draft_watermarkers
