"""Plugin: EAGLE heads draft from the target's hidden states (`eagle`, `eagle3`, `peagle`)."""

from __future__ import annotations

from specreg.capabilities import (
    Capabilities,
    DraftingStyle,
    DraftLogitsLayout,
    HiddenStates,
    TargetNeeds,
)
from specreg.plugin import DraftSetup, SpeculatorSpec, hookimpl
from specreg_eagle.aux_layers import aux_layer_ids, num_target_layers
from specreg_eagle.config_parts import reduced_vocab_size
from specreg_eagle.eagle1_config import Eagle1Config
from specreg_eagle.eagle3_config import Eagle3Config
from specreg_eagle.recognition import is_eagle1, is_eagle3, is_parallel

__all__ = ["specreg_speculators"]

# How a config is called in errors before its path is known.
DRAFT_CONFIG = "the draft checkpoint's config.json"


def _capabilities(style: DraftingStyle, draft_vocab_size: int | None = None) -> Capabilities:
    """Of every head; a reduced vocabulary adds its own layout."""
    reduced = set() if draft_vocab_size is None else {DraftLogitsLayout.DRAFT_VOCAB}
    return Capabilities(
        style=style,
        supports_probabilistic=True,
        honors_owner_mask=True,
        layouts=frozenset({DraftLogitsLayout.DENSE} | reduced),
        supports_watermarker=True,
        is_cuda_graph_safe=True,
        draft_vocab_size=draft_vocab_size,
    )


def eagle3_capabilities(setup: DraftSetup) -> Capabilities:
    """Draft after draft."""
    reduced = reduced_vocab_size(setup.draft_config, DRAFT_CONFIG)
    return _capabilities(DraftingStyle.AUTOREGRESSIVE, reduced)


def peagle_capabilities(setup: DraftSetup) -> Capabilities:
    """All drafts in one pass."""
    reduced = reduced_vocab_size(setup.draft_config, DRAFT_CONFIG)
    return _capabilities(DraftingStyle.PARALLEL, reduced)


def eagle1_needs(setup: DraftSetup) -> TargetNeeds:
    """The target's states after its final norm, and one token beyond a chunk of the prompt."""
    config = setup.draft_config
    return TargetNeeds(
        hidden_states=HiddenStates.POST_NORM,
        prefill_lookahead=1,
        kv_specs=Eagle1Config.read(config, DRAFT_CONFIG).shape.kv_specs if config else (),
    )


def eagle3_needs(setup: DraftSetup) -> TargetNeeds:
    """The residual streams that the config names, or the states after the final norm."""
    if not setup.draft_config:
        return TargetNeeds(prefill_lookahead=1)
    config = Eagle3Config.read(setup.draft_config, DRAFT_CONFIG)
    kv_specs = config.shape.kv_specs
    if not config.uses_aux_states:
        return TargetNeeds(
            hidden_states=HiddenStates.POST_NORM, prefill_lookahead=1, kv_specs=kv_specs
        )
    ids = aux_layer_ids(config, num_target_layers(setup.target_config))
    return TargetNeeds(aux_layer_ids=ids, prefill_lookahead=1, kv_specs=kv_specs)


@hookimpl
def specreg_speculators() -> list[SpeculatorSpec]:
    return [
        SpeculatorSpec(
            name="eagle",
            methods=("eagle",),
            factory="specreg_eagle.speculator:make_eagle1",
            capabilities=_capabilities(DraftingStyle.AUTOREGRESSIVE),
            target_needs=eagle1_needs,
            detects=is_eagle1,
            random_drafter="specreg_eagle.random_drafter:write_eagle1",
            summary="EAGLE-1 and EAGLE-2 heads over the target's last hidden state",
        ),
        SpeculatorSpec(
            name="eagle3",
            methods=("eagle3",),
            factory="specreg_eagle.speculator:make_eagle3",
            capabilities=eagle3_capabilities,
            target_needs=eagle3_needs,
            detects=is_eagle3,
            random_drafter="specreg_eagle.random_drafter:write_eagle3",
            summary="EAGLE-3 heads over hidden states of three or so target layers",
        ),
        SpeculatorSpec(
            name="peagle",
            methods=("eagle3", "peagle"),
            factory="specreg_eagle.speculator:make_peagle",
            capabilities=peagle_capabilities,
            target_needs=eagle3_needs,
            predicate=is_parallel,
            random_drafter="specreg_eagle.random_drafter:write_peagle",
            summary="EAGLE-3 heads that draft every token in one pass (P-EAGLE)",
        ),
    ]
