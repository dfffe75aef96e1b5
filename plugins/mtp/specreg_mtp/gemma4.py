"""The speculator `gemma4`: what it declares. Imports no torch."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle, HiddenStates, TargetNeeds
from specreg.config_reader import ConfigReader
from specreg.plugin import DraftSetup, SpeculatorSpec
from specreg_mtp.gemma4_config import AssistantConfig
from specreg_mtp.gemma4_sharing import shared_layers

__all__ = ["GEMMA4"]

CAPABILITIES = Capabilities(
    style=DraftingStyle.AUTOREGRESSIVE,
    supports_probabilistic=True,
    honors_owner_mask=True,
    supports_watermarker=True,
    is_cuda_graph_safe=True,
)


def target_needs(setup: DraftSetup) -> TargetNeeds:
    """The target's final states and some layers' keys and values; it keeps none of its own."""
    layers: tuple[int, ...] = ()
    if setup.draft_config and setup.target_config:
        config = AssistantConfig.read(ConfigReader(setup.draft_config, "the draft config.json"))
        found = shared_layers(config, setup.target_config)
        layers = tuple(sorted(layer.index for layer in found.values()))
    return TargetNeeds(hidden_states=HiddenStates.POST_NORM, target_kv_layers=layers)


GEMMA4 = SpeculatorSpec(
    name="gemma4",
    methods=("mtp", "gemma4_mtp"),
    factory="specreg_mtp.gemma4_speculator:Gemma4Speculator",
    capabilities=CAPABILITIES,
    target_needs=target_needs,
    architectures=("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    summary="a Gemma 4 assistant, which attends over the target's keys and values",
    tiny_subject="specreg_mtp.gemma4_random:tiny_subject",
    random_drafter="specreg_mtp.gemma4_random:random_drafter",
)
