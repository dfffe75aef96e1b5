"""What the package registers for MTP modules, besides the assistants of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.capabilities import Capabilities, DraftingStyle, TargetNeeds
from specreg.plugin import DraftSetup, SpeculatorSpec
from specreg_mtp.conventions import METHODS
from specreg_mtp.settings import MTPSettings, names_modules, num_modules_of

__all__ = ["MTP", "MULTI_MODULE_MTP"]


def capabilities(setup: DraftSetup) -> Capabilities:
    """With several modules a proposal has no more steps than those; one serves any number."""
    num_modules = MTPSettings(setup.draft_config).num_declared if setup.draft_config else 1
    return Capabilities(
        style=DraftingStyle.AUTOREGRESSIVE,
        supports_probabilistic=True,
        honors_owner_mask=True,
        supports_watermarker=True,
        is_cuda_graph_safe=True,
        max_num_speculative_tokens=num_modules if num_modules > 1 else None,
    )


def target_needs(setup: DraftSetup) -> TargetNeeds:
    """The target's states, one layer of KV a module, and prompt tokens for each module to read."""
    if not setup.draft_config:
        return TargetNeeds(prefill_lookahead=1)
    settings = MTPSettings(setup.draft_config, setup.num_speculative_tokens)
    return TargetNeeds(
        hidden_states=settings.hidden_states,
        prefill_lookahead=settings.num_used,
        kv_specs=settings.kv_specs,
    )


def _has_several_modules(config: Mapping[str, Any]) -> bool:
    return (num_modules_of(config) or 1) > 1


MTP = SpeculatorSpec(
    name="mtp",
    methods=METHODS,
    factory="specreg_mtp.factory:make_speculator",
    capabilities=capabilities,
    target_needs=target_needs,
    detects=names_modules,
    may_lie_in_target=True,
    default_num_speculative_tokens=num_modules_of,
    random_drafter="specreg_mtp.random_drafter:random_drafter",
    summary="one MTP module, applied again to what it gave",
)

MULTI_MODULE_MTP = SpeculatorSpec(
    name="multi_module_mtp",
    methods=METHODS,
    factory="specreg_mtp.factory:make_speculator",
    capabilities=capabilities,
    target_needs=target_needs,
    predicate=_has_several_modules,
    may_lie_in_target=True,
    default_num_speculative_tokens=num_modules_of,
    random_drafter="specreg_mtp.random_drafter:random_multi_module_drafter",
    summary="several MTP modules, one a draft, over all rows of a round",
)
