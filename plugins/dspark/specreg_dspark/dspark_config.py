"""What describes a DSpark drafter, read from either form of config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from specreg_dflash.backbone_config import BackboneConfig, read_backbone
from specreg_dflash.config_form import ConfigForm

from specreg.errors import CheckpointError
from specreg_dspark.recognition import refuse_other_layers

__all__ = ["DSparkConfig", "read_dspark"]

MARKOV_HEADS = ("gated", "rnn", "vanilla")
# What the library `speculators` takes where its form lacks a key; the other form must have them.
DEFAULT_BLOCK_SIZE = 8
DEFAULT_RANK = 256


@dataclass(frozen=True)
class DSparkConfig:
    """A DSpark drafter.

    Attributes:
        backbone: of the drafter.
        is_anchor_first: the anchor's row gives the first draft, and every row the token behind it;
            otherwise a mask row gives the token of its own position, and the anchor's row none.
        markov_rank: width of the Markov head's tables.
        markov_head: `vanilla`, `gated` or `rnn`.
        has_confidence_head: the checkpoint tells how likely a draft is accepted.
        confidence_reads_markov: that head sees the token before the draft.
        soft_cap: base logits and bias become `soft_cap * tanh(x / soft_cap)` each; None leaves
            them.
    """

    backbone: BackboneConfig
    is_anchor_first: bool
    markov_rank: int
    markov_head: str
    has_confidence_head: bool
    confidence_reads_markov: bool
    soft_cap: float | None

    @property
    def first_row(self) -> int:
        """The row of a block that gives the first draft."""
        return 0 if self.is_anchor_first else 1

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.backbone.block_size - self.first_row


def read_dspark(form: ConfigForm) -> DSparkConfig:
    """Read a DSpark config.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, contradicts another one or asks
            for what is not implemented.
    """
    refuse_other_layers(form)
    top, is_library = form.top, form.is_speculators
    block_size = DEFAULT_BLOCK_SIZE
    if "block_size" not in form.reader_of("block_size") and not is_library:
        key = "dspark_block_size" if "dspark_block_size" in top else "block_size"
        block_size = top.integer(key)
    top.accept("dspark_block_size")
    rank = form.reader_of("markov_rank")
    config = DSparkConfig(
        backbone=read_backbone(form, block_size=block_size),
        is_anchor_first=form.reader_of("sample_from_anchor").flag("sample_from_anchor", True),
        markov_rank=rank.integer("markov_rank", DEFAULT_RANK)
        if is_library
        else rank.integer("markov_rank"),
        markov_head=form.reader_of("markov_head_type").text("markov_head_type", "vanilla"),
        has_confidence_head=_flag(form, "enable_confidence_head"),
        confidence_reads_markov=_flag(form, "confidence_head_with_markov"),
        soft_cap=_soft_cap(form),
    )
    if config.markov_head not in MARKOV_HEADS:
        _refuse(
            "the Markov head of a drafter is of a kind that is not known here",
            f"{top.where}, markov_head_type",
            f"{config.markov_head!r}; allowed: {', '.join(MARKOV_HEADS)}",
        )
    if "eagle_config" in top:
        reads_taps = top.section("eagle_config").flag("use_aux_hidden_state", True)
        if reads_taps != bool(config.backbone.aux_layer_ids):
            _refuse(
                "a config says twice what the drafter reads of the target, and not alike",
                f"{top.where}, eagle_config.use_aux_hidden_state",
                f"{reads_taps}; allowed: the same as use_aux_hidden_state elsewhere",
            )
    if config.max_drafts < 1:
        _refuse(
            "the block of a drafter has no row for a draft",
            f"{top.where}, block_size",
            f"{config.backbone.block_size}; allowed: at least 2 where sample_from_anchor is false",
        )
    return config


def _flag(form: ConfigForm, key: str) -> bool:
    return form.reader_of(key).flag(key, form.is_speculators)


def _soft_cap(form: ConfigForm) -> float | None:
    key = "final_logit_softcapping"
    reader = form.reader_of(key)
    cap = (reader if key in reader else form.decoder).number(key, None)
    form.decoder.accept(key)
    if cap is not None and cap < 0:
        _refuse(
            "the soft cap of a drafter's logits is none",
            f"{form.top.where}, {key}",
            f"{cap}; allowed: 0 for none, or above",
        )
    return cap or None


def _refuse(what: str, where: str, got: str) -> NoReturn:
    raise CheckpointError(
        what, where=where, got=got, fix="use the config.json that belongs to the weights"
    )
