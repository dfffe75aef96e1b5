"""What an EAGLE-3 head's `config.json` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.nn.shape import DecoderShape
from specreg_eagle.aux_layers import stated_aux_layer_ids
from specreg_eagle.config_parts import ConfigParts
from specreg_eagle.recognition import EAGLE3_FAMILIES, MASK_TOKEN_KEYS

__all__ = ["Eagle3Config"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head, P-EAGLE included.

    Attributes:
        reader: to report from when everything is read.
        where: path of the file.
        shape: of the decoder layers.
        vocab_size: tokens of the target.
        draft_vocab_size: columns of its head.
        target_hidden_size: width of a target state.
        uses_aux_states: it projects residual streams; otherwise it reads the target's states after
            the final norm as they are.
        stated_aux_ids: entry ids of those streams; None where the config states none.
        num_aux_states: how many there are, where the config says that.
        norm_before_residual: the residual stream starts with normalised states.
        norm_before_fc: a norm over all states together precedes the projection.
        fc_norm: a norm over each state precedes it.
        norm_output: the normalised output is fed back, not the stream before it.
        logit_scale: factor on the logits.
        has_attention_bias: whether queries, keys and values have a bias; None where the config does
            not say.
        mask_token_id: token of the rows that stand for drafts; None for a head without them.
        is_residual_norm_assumed: `norm_before_residual` is absent where readers differ about it.
    """

    reader: ConfigReader
    where: str
    shape: DecoderShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    uses_aux_states: bool
    stated_aux_ids: tuple[int, ...] | None
    num_aux_states: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    logit_scale: float
    has_attention_bias: bool | None
    mask_token_id: int | None
    is_residual_norm_assumed: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Eagle3Config:
        """Read a config. Raises `CheckpointError`, also for families that are not known."""
        parts = ConfigParts.of(config, where)
        head, decoder = parts.head, parts.decoder
        family = parts.family(EAGLE3_FAMILIES)
        shape = DecoderShape.read(decoder, has_head_norms=family == "qwen3")
        vocab_size = decoder.integer("vocab_size")
        eagle = head.section("eagle_config")
        uses_aux = eagle.flag("use_aux_hidden_state", True)
        # vLLM takes True for eagle3 of speculators, where the library itself takes False.
        is_assumed = parts.is_speculators and "norm_before_residual" not in head
        starts_normed = config.get("speculators_model_type") == "eagle3"
        before_fc = fc_norm = False
        if uses_aux:
            before_fc = eagle.flag("norm_before_fc", head.flag("norm_before_fc", False))
            fc_norm = head.flag("fc_norm", False)
        if parts.is_speculators:
            head.accept("embed_requires_grad")
            _refuse_both(before_fc and fc_norm, where)
        return cls(
            reader=head,
            where=where,
            shape=shape,
            vocab_size=vocab_size,
            draft_vocab_size=_draft_vocab_size(head) or vocab_size,
            target_hidden_size=head.integer("target_hidden_size", shape.hidden_size),
            uses_aux_states=uses_aux,
            stated_aux_ids=stated_aux_layer_ids(head) if uses_aux else None,
            num_aux_states=_num_aux_states(head) if uses_aux else None,
            norm_before_residual=head.flag("norm_before_residual", starts_normed),
            norm_before_fc=before_fc,
            fc_norm=fc_norm,
            norm_output=head.flag("norm_output", False),
            logit_scale=head.number("logit_scale", 1.0),
            has_attention_bias=shape.attention_bias if "attention_bias" in decoder else None,
            mask_token_id=_mask_token_id(head),
            is_residual_norm_assumed=is_assumed,
        )

    def report(self) -> None:
        """Tell what nothing reads and what was assumed. Called once, when weights are loaded."""
        if self.is_residual_norm_assumed:
            logger.warning(
                "%s: norm_before_residual is absent; %s is taken, as vLLM does, and other readers "
                "differ",
                self.where,
                self.norm_before_residual,
            )
        self.reader.report()


def _draft_vocab_size(config: ConfigReader) -> int | None:
    nested = config.integer("truncated_vocab_size", None)
    return config.integer("draft_vocab_size", None) or nested


def _num_aux_states(config: ConfigReader) -> int | None:
    counts = {key: config.integer(key, None) for key in ("num_aux_hidden_states", "num_aux_layers")}
    first, second = counts.values()
    if first is not None and second is not None and first != second:
        raise CheckpointError(
            "a config states two numbers of target states",
            where=config.where,
            got=f"{counts}; allowed: one number",
            fix="use the config.json that belongs to the weights",
        )
    return first or second


def _mask_token_id(config: ConfigReader) -> int | None:
    found = None
    for place in MASK_TOKEN_KEYS:
        section, _, key = place.rpartition(".")
        if section and section not in config:
            continue
        reader = config.section(section) if section else config
        value = reader.integer(key, None, minimum=0)
        found = value if found is None else found
    return found


def _refuse_both(has_both: bool, where: str) -> None:
    if has_both:
        raise CheckpointError(
            "a config asks for two norms before the projection that exclude each other",
            where=where,
            got="norm_before_fc and fc_norm both true; allowed: one of them",
            fix="use the config.json that belongs to the weights",
        )
