"""What a DFlash drafter declares, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specreg.capabilities import (
    Capabilities,
    DraftingStyle,
    DraftLogitsLayout,
    TargetNeeds,
)
from specreg.errors import CheckpointError
from specreg.plugin import DraftSetup
from specreg_dflash.backbone_config import BackboneConfig, read_backbone
from specreg_dflash.config_form import ConfigForm

__all__ = ["backbone_needs", "dflash_capabilities", "max_drafts", "read_fill_in"]


def read_fill_in(form: ConfigForm, **absent: Any) -> BackboneConfig:
    """The backbone of a drafter whose mask rows predict the tokens of their own positions.

    Args:
        form: the config.
        absent: what is taken for keys that are absent, as of `read_backbone`.

    Raises:
        CheckpointError: a config that is wrong, or of a drafter that samples from the anchor's row.
    """
    config = read_backbone(form, **absent)
    if form.reader_of("sample_from_anchor").flag("sample_from_anchor", False):
        raise CheckpointError(
            "a drafter of this kind does not sample from the anchor's row",
            where=f"{config.where}, sample_from_anchor",
            got="true; allowed: false",
            fix="use the config.json that belongs to the weights, or the method dspark",
        )
    if config.block_size < 2:
        raise CheckpointError(
            "the block of a drafter has no row for a draft",
            where=f"{config.where}, block_size",
            got=f"{config.block_size}; allowed: at least 2, the anchor's row included",
            fix="use the config.json that belongs to the weights",
        )
    return config


def dflash_capabilities(setup: DraftSetup) -> Capabilities:
    """Of DFlash; reduced vocabularies add a layout."""
    if not setup.draft_config:
        return _capabilities(None)
    config = read_fill_in(ConfigForm.of(setup.draft_config))
    return replace(
        _capabilities(config.reduced_vocab_size), max_num_speculative_tokens=config.block_size - 1
    )


def _capabilities(reduced: int | None) -> Capabilities:
    layouts = {DraftLogitsLayout.DENSE}
    if reduced is not None:
        layouts.add(DraftLogitsLayout.DRAFT_VOCAB)
    return Capabilities(
        style=DraftingStyle.PARALLEL,
        supports_probabilistic=True,
        honors_owner_mask=True,
        layouts=frozenset(layouts),
        supports_watermarker=True,
        is_cuda_graph_safe=True,
        draft_vocab_size=reduced,
    )


def backbone_needs(setup: DraftSetup) -> TargetNeeds:
    """Of every drafter with the backbone."""
    if not setup.draft_config:
        return TargetNeeds()
    return read_backbone(ConfigForm.of(setup.draft_config)).needs


def max_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block: a row each behind the anchor's. Raises `CheckpointError`."""
    return read_fill_in(ConfigForm.of(draft_config)).block_size - 1
