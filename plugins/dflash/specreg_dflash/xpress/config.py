"""What describes an XPress drafter's refiner, and what such a drafter declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specreg.capabilities import Capabilities, DraftingStyle
from specreg.plugin import DraftSetup
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.declarations import read_fill_in
from specreg_dflash.xpress.options import XPressOptions

__all__ = [
    "RefinerConfig",
    "XPressConfig",
    "num_candidates",
    "read_xpress",
    "xpress_capabilities",
    "xpress_drafts",
]

DEFAULT_RANK = 256
DEFAULT_RATIO = 2
DEFAULT_PASSES = 6
DEFAULT_CANDIDATES = 512


@dataclass(frozen=True)
class RefinerConfig:
    """A refiner.

    Attributes:
        rank: width of its states.
        mlp_size: inner width of its feed-forward block.
        block_size: rows that its mixer was trained for, the anchor's included.
        num_passes: refinements of a proposal.
        num_candidates: columns that a refinement may choose; 0 is all.
    """

    rank: int
    mlp_size: int
    block_size: int
    num_passes: int
    num_candidates: int


class XPressConfig(NamedTuple):
    """Both halves of an XPress drafter."""

    backbone: BackboneConfig
    refiner: RefinerConfig

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block: no more than backbone and mixer were trained for."""
        return min(self.backbone.block_size, self.refiner.block_size) - 1


def read_xpress(form: ConfigForm) -> XPressConfig:
    """Read a config. Raises `CheckpointError`."""
    backbone = read_fill_in(form)
    backbone.require_full_vocabulary()
    top = form.top
    rank = top.integer("xpress_rank", DEFAULT_RANK)
    if form.is_speculators:
        mlp_size = rank * top.integer("xpress_mlp_ratio", DEFAULT_RATIO)
        num_passes = top.integer("num_jacobi_passes", DEFAULT_PASSES)
    else:
        mlp_size = top.integer("xpress_mlp_hidden", rank * DEFAULT_RATIO)
        num_passes = top.integer("xpress_num_passes", DEFAULT_PASSES)
    num_steps = top.integer("num_speculative_steps", None)
    rows = backbone.block_size if num_steps is None else num_steps + 1
    top.accept("xpress_compile_head")  # tells another engine how to run it, not what it computes
    return XPressConfig(
        backbone,
        RefinerConfig(
            rank=rank,
            mlp_size=mlp_size,
            block_size=top.integer("xpress_block_size", rows, minimum=2),
            num_passes=num_passes,
            num_candidates=top.integer("xpress_topc", DEFAULT_CANDIDATES, minimum=0),
        ),
    )


def num_candidates(refiner: RefinerConfig, options: XPressOptions | None) -> int:
    """Columns that a refinement may choose: the option's, or else the checkpoint's; 0 is all."""
    chosen = None if options is None else options.xpress_topc
    return refiner.num_candidates if chosen is None else chosen


def xpress_drafts(draft_config: Mapping[str, Any]) -> int:
    """Drafts of a whole block. Raises `CheckpointError`."""
    return read_xpress(ConfigForm.of(draft_config)).max_drafts


def xpress_capabilities(setup: DraftSetup) -> Capabilities:
    """A refined token is where passes come to rest, not a draw: there is no law to draw it from."""
    return Capabilities(
        style=DraftingStyle.PARALLEL,
        supports_probabilistic=False,
        # Without a distribution there is nothing to write: no layout, and no write past the mask.
        layouts=frozenset(),
        honors_owner_mask=True,
        is_cuda_graph_safe=True,
        max_num_speculative_tokens=xpress_drafts(setup.draft_config)
        if setup.draft_config
        else None,
    )
