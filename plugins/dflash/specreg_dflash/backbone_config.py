"""What describes the backbone of a block drafter, read from either form of config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from specreg.capabilities import HiddenStates, TargetNeeds
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.nn.shape import DecoderShape
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.tapped_layers import tapped_layers

__all__ = ["BackboneConfig", "read_backbone"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_THETA = 1_000_000.0
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class BackboneConfig:
    """A block drafter's backbone.

    Attributes:
        where: the file, for errors.
        shape: of its decoder layers.
        is_causal: a layer: whether a row sees no later row of its block.
        aux_layer_ids: entry ids of the target's states that it reads, ascending; empty where it
            reads the target's last hidden state.
        target_hidden_size: width of one of them.
        num_target_layers: depth of the target that it was trained for; None when it does not say.
        mask_token_id: what stands on rows whose token is not known yet.
        block_size: rows of a block in training.
        vocab_size, draft_vocab_size: ids that it embeds, and columns that it scores.
        has_own_head: the config says that the checkpoint has a head.
        logit_scale: factor on its logits.
        embedding_scale: factor on the embeddings of a block's rows.
    """

    where: str
    shape: DecoderShape
    is_causal: tuple[bool, ...]
    aux_layer_ids: tuple[int, ...]
    target_hidden_size: int
    num_target_layers: int | None
    mask_token_id: int
    block_size: int
    vocab_size: int
    draft_vocab_size: int
    has_own_head: bool = False
    logit_scale: float = 1.0
    embedding_scale: float = 1.0

    @property
    def needs(self) -> TargetNeeds:
        """What it reads of the target, and the KV layers of its own."""
        hidden = HiddenStates.NONE if self.aux_layer_ids else HiddenStates.POST_NORM
        return TargetNeeds(
            hidden_states=hidden,
            aux_layer_ids=self.aux_layer_ids,
            kv_specs=self.shape.kv_specs,
        )

    @property
    def reduced_vocab_size(self) -> int | None:
        """Columns of its head where these are fewer than the ids; else None."""
        return self.draft_vocab_size if self.draft_vocab_size < self.vocab_size else None

    def require_full_vocabulary(self) -> None:
        """For drafters whose tables are indexed by target ids. Raises `CheckpointError`."""
        if self.reduced_vocab_size is not None:
            _refuse(
                "a drafter that needs the whole vocabulary has a reduced one",
                f"{self.where}, draft_vocab_size",
                f"{self.draft_vocab_size}",
                f"the vocab_size {self.vocab_size}",
            )


def read_backbone(
    form: ConfigForm,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    sliding_window_non_causal: bool = False,
) -> BackboneConfig:
    """Read what all block drafters have in common.

    Args:
        form: the config.
        block_size, sliding_window_non_causal: what the drafter's library takes where they are
            absent.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, contradicts another one or asks
            for what is not implemented.
    """
    decoder, section, top = form.decoder, form.section, form.top
    num_layers = decoder.integer("num_hidden_layers")
    sliding = _sliding(decoder, num_layers)
    shape = DecoderShape.read(
        decoder,
        has_head_norms=True,
        sliding_windows=_windows(form, sliding),
        has_sinks=form.reader_of("attention_sink_bias").flag(
            "attention_sink_bias", top.flag("add_swa_attention_sink_bias", False)
        ),
        value_scale=section.number("attention_value_scale", 1.0),
    )
    if not top.flag("is_neox_style", True):
        _refuse(
            "a drafter rotates its heads in a layout that is not known here",
            f"{top.where}, is_neox_style",
            "false",
            "true",
        )
    vocab_size = decoder.integer("vocab_size")
    reads_taps = form.reader_of("use_aux_hidden_state").flag("use_aux_hidden_state", True)
    target_width = top.integer("target_hidden_size", None)
    return BackboneConfig(
        where=top.where,
        shape=_with_default_theta(shape),
        is_causal=_is_causal(form, sliding, sliding_window_non_causal),
        aux_layer_ids=tapped_layers(form, num_layers) if reads_taps else (),
        target_hidden_size=shape.hidden_size if target_width is None else target_width,
        num_target_layers=top.integer("num_target_layers", None),
        mask_token_id=_mask_token_id(form),
        block_size=form.reader_of("block_size").integer("block_size", block_size),
        vocab_size=vocab_size,
        draft_vocab_size=top.integer("draft_vocab_size", vocab_size),
        has_own_head=top.flag("has_own_lm_head", False),
        logit_scale=top.number("logit_scale", 1.0),
        embedding_scale=section.number("input_embedding_scale", 1.0),
    )


def _windows(form: ConfigForm, sliding: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Keys visible to a query a layer; None means all."""
    decoder, section = form.decoder, form.section
    if section.flag("use_swa", False) and not any(sliding):
        sliding = (True,) * len(sliding)
    window = section.integer("swa_window_size", None)
    fallback = decoder.integer("sliding_window", None)
    if any(sliding) and window is None and fallback is None:
        decoder.integer("sliding_window")
    return tuple((window or fallback) if is_sliding else None for is_sliding in sliding)


def _sliding(decoder: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """What `layer_types` says of each layer; nothing slides where it is absent."""
    types = decoder.texts("layer_types")
    decoder.accept("use_sliding_window", "max_window_layers")
    if types is None:
        return (False,) * num_layers
    if len(types) < num_layers or set(types) - {"full_attention", SLIDING}:
        _refuse(
            "the layer types of a config do not describe its layers",
            f"{decoder.where}, layer_types",
            f"{list(types)} for {num_layers} layers",
            f"full_attention or {SLIDING} a layer",
        )
    return tuple(kind == SLIDING for kind in types[:num_layers])


def _is_causal(form: ConfigForm, sliding: tuple[bool, ...], non_causal: bool) -> tuple[bool, ...]:
    """Layers typed as sliding are causal in the block, others are not, unless the config says so.

    In the form of `speculators` the flag speaks of layers that slide, and of no other. Layers that
    `use_swa` alone makes slide are not causal.
    """
    if form.is_speculators:
        is_causal = not form.top.flag("sliding_window_non_causal", non_causal)
        return tuple(is_sliding and is_causal for is_sliding in sliding)
    for reader, key in ((form.top, "is_causal"), (form.section, "causal")):
        if key in reader:
            form.section.accept("causal")
            return (reader.flag(key, False),) * len(sliding)
    return sliding


def _mask_token_id(form: ConfigForm) -> int:
    others = ("dspark_noise_token_id", "pard_token", "ptd_token_id")
    places = [(form.section, "mask_token_id"), *((form.top, k) for k in ("mask_token_id", *others))]
    for reader, key in places:
        if key in reader:
            form.top.accept("mask_token_id", *others)
            return reader.integer(key, minimum=0)
    return form.section.integer("mask_token_id", minimum=0)


def _with_default_theta(shape: DecoderShape) -> DecoderShape:
    """The theta of Qwen3, where a config has none."""
    told = [shape.rope, *(shape.rope.get(key) for key in ("rope_parameters", "rope_scaling"))]
    if any(isinstance(part, Mapping) and part.get("rope_theta") is not None for part in told):
        return shape
    return replace(shape, rope={**shape.rope, "rope_theta": DEFAULT_THETA})


def _refuse(what: str, where: str, got: str, allowed: str) -> NoReturn:
    raise CheckpointError(
        what,
        where=where,
        got=f"{got}; allowed: {allowed}",
        fix="use the config.json that belongs to the weights",
    )
