"""What a DSpark drafter declares, from its config and its options alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specreg_dflash.config_form import ConfigForm

from specreg.capabilities import (
    CacheDtype,
    Capabilities,
    DraftingStyle,
    DraftLogitsLayout,
    FusedSampling,
    TargetNeeds,
)
from specreg.errors import ConfigError
from specreg.plugin import DraftSetup
from specreg_dspark.dspark_config import read_dspark

__all__ = ["MAX_CANDIDATES", "dspark_capabilities", "dspark_needs", "max_drafts"]

MAX_CANDIDATES = 128
"""Candidates a step that are stored as pairs; rows of more are stored whole."""


def dspark_capabilities(setup: DraftSetup) -> Capabilities:
    """Of DSpark; a reduced vocabulary and few candidates a step add a layout each.

    With a fused sampler that is named or required there are no draft watermarks.

    Raises:
        CheckpointError: a config that is wrong.
        ConfigError: more candidates than the head has columns.
    """
    plain = Capabilities(
        style=DraftingStyle.SEMI_AUTOREGRESSIVE,
        supports_probabilistic=True,
        honors_owner_mask=True,
        layouts=frozenset({DraftLogitsLayout.DENSE}),
        supports_watermarker=True,
        is_cuda_graph_safe=True,
    )
    options = setup.options
    top_k = None if options is None else options.dspark_draft_topk
    if options is not None and (options.fused_sampler or options.fused_sampling == "require"):
        plain = replace(plain, supports_watermarker=False)  # the loop alone can mark
    if top_k is None and (options is None or options.fused_sampling != "off"):
        # What the stock one writes; loading tells of another one that writes the whole cache.
        plain = replace(plain, fused_sampling=FusedSampling.SHARDED)
    if setup.draft_config:
        config = read_dspark(ConfigForm.of(setup.draft_config))
        num_columns = config.backbone.draft_vocab_size
        if top_k is not None and top_k > num_columns:
            raise ConfigError(
                "a drafter cannot choose among so many candidates",
                where="speculative_config.dspark_draft_topk",
                got=f"{top_k}; allowed: 1 to {num_columns}, the columns of its head",
                fix="lower it, or leave it out",
            )
        plain = replace(
            plain,
            draft_vocab_size=config.backbone.reduced_vocab_size,
            max_num_speculative_tokens=config.max_drafts,
        )
        if config.markov_head != "vanilla":
            plain = replace(plain, fused_sampling=FusedSampling.NONE)
    if top_k is not None and top_k <= MAX_CANDIDATES:
        # Candidates carry the target's ids, so the map of a reduced vocabulary is not the cache's.
        return replace(
            plain,
            layouts=frozenset({DraftLogitsLayout.TOP_K, DraftLogitsLayout.DENSE}),
            cache_dtype=CacheDtype.FLOAT32,
            supports_watermarker=False,
            draft_vocab_size=None,
            num_candidates=top_k,
        )
    if plain.draft_vocab_size is not None:
        return replace(plain, layouts=plain.layouts | {DraftLogitsLayout.DRAFT_VOCAB})
    return plain


def dspark_needs(setup: DraftSetup) -> TargetNeeds:
    """States of tapped layers, and a KV layer a decoder layer. Raises `CheckpointError`."""
    if not setup.draft_config:
        return TargetNeeds()
    return read_dspark(ConfigForm.of(setup.draft_config)).backbone.needs


def max_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block. Raises `CheckpointError`."""
    return read_dspark(ConfigForm.of(draft_config)).max_drafts
