"""The contract between specreg and a plugin: hooks, and the data that they return.

A plugin is a module (or object) named by an entry point of the group `specreg`, with functions
marked `hookimpl`. Name the entry point after the method that it serves: when a plugin cannot be
imported, that name is all that tells what it would have offered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import pluggy

from specreg.specs import (
    API_VERSION,
    DraftSetup,
    DraftWatermarkerFactory,
    PolicyInputs,
    PolicyRule,
    RejectionSamplerFactory,
    SpeculatorSpec,
)

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "DraftSetup",
    "DraftWatermarkerFactory",
    "Hooks",
    "PolicyInputs",
    "PolicyRule",
    "RejectionSamplerFactory",
    "SpeculatorSpec",
    "hookimpl",
    "hookspec",
]

ENTRY_POINT_GROUP = "specreg"

hookspec = pluggy.HookspecMarker("specreg")
hookimpl = pluggy.HookimplMarker("specreg")


class Hooks(Protocol):
    """The hooks of specreg. All run at load time; the step loop calls typed objects."""

    @hookspec
    def specreg_speculators(self) -> Iterable[SpeculatorSpec]:
        """Offer speculators.

        When: while plugins are loaded, before any configuration is read.
        How often: once a process.
        Parameters: none.
        Returns: the plugin's `SpeculatorSpec`s; names are unique within the plugin.
        Errors: whatever it raises makes the plugin a broken one; others load all the same.
        Do not: import torch, triton or the speculator's own modules, open files or ask for devices.
        """

    @hookspec
    def specreg_policy_rules(self) -> Iterable[PolicyRule]:
        """Add conditions for sharding the draft-logits cache.

        When: while plugins are loaded; the rules are evaluated when a plan is resolved and again
            when it is made final.
        How often: once a process.
        Parameters: none.
        Returns: `PolicyRule`s, which apply to the runs of every speculator.
        Errors: whatever it raises makes the plugin a broken one; others load all the same.
        Do not: evaluate anything yet, or replace a rule of the core.
        """

    @hookspec
    def specreg_rejection_samplers(self) -> Iterable[RejectionSamplerFactory]:
        """Offer rejection samplers that the key `rejection_sampler` can name.

        When: while plugins are loaded; the factory is imported when a run selects it.
        How often: once a process.
        Parameters: none.
        Returns: `RejectionSamplerFactory`s with what each reads declared.
        Errors: whatever it raises makes the plugin a broken one; others load all the same.
        Do not: import torch, triton or the sampler's own modules.
        """

    @hookspec
    def specreg_draft_watermarkers(self) -> Iterable[DraftWatermarkerFactory]:
        """Offer draft watermarkers that the key `draft_watermarker` can name.

        When: while plugins are loaded; the factory is imported when a run selects it.
        How often: once a process.
        Parameters: none.
        Returns: `DraftWatermarkerFactory`s with `honors_owner_mask` declared.
        Errors: whatever it raises makes the plugin a broken one; others load all the same.
        Do not: import torch, triton or the watermarker's own modules.
        """

    @hookspec
    def specreg_hookspecs(self) -> Iterable[Any]:
        """Add hooks of the plugin's own, for other plugins to implement.

        When: before any other hook is called, so that implementations can be checked against them.
        How often: once a process.
        Parameters: none.
        Returns: classes or modules whose functions are marked `hookspec` and documented like these.
        Errors: whatever it raises makes the plugin a broken one; others load all the same.
        Do not: rely on an implementation being installed; implementers mark theirs
            `hookimpl(optionalhook=True)` so that they load without this plugin.
        """
