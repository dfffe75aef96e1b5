"""Plugin: a standalone language model drafts, one token a pass (`method: draft_model`)."""

from __future__ import annotations

from specreg.capabilities import Capabilities, DraftingStyle, TargetNeeds
from specreg.nn.kv_specs import kv_specs_from_config
from specreg.plugin import DraftSetup, SpeculatorSpec, hookimpl

__all__ = ["specreg_speculators"]

CAPABILITIES = Capabilities(
    style=DraftingStyle.AUTOREGRESSIVE,
    supports_probabilistic=True,
    honors_owner_mask=True,
    supports_watermarker=True,
    is_cuda_graph_safe=True,
)


def target_needs(setup: DraftSetup) -> TargetNeeds:
    """It reads nothing of the target but its tokens, and keeps KV for each of its own layers."""
    config = setup.draft_config
    return TargetNeeds(kv_specs=kv_specs_from_config(config) if config else ())


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="draft_model",
            methods=("draft_model",),
            factory="specreg_draft_model.speculator:DraftModelSpeculator",
            capabilities=CAPABILITIES,
            target_needs=target_needs,
            tiny_subject="specreg_draft_model.tiny:tiny_subject",
            summary="a smaller language model with the target's vocabulary",
        )
    ]
