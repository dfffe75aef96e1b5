"""What the `config.json` of a Gemma 4 assistant says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError

__all__ = ["FULL", "SLIDING", "UNIFIED", "AssistantConfig", "Centroids"]

SLIDING, FULL = "sliding_attention", "full_attention"
# Where layer types are left out, every sixth layer sees everything.
FULL_EVERY = 6
UNIFIED = "gemma4_unified_assistant"
DEFAULT_ROPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
)


class Centroids(NamedTuple):
    """How an ordered head is divided: `num` groups of tokens, of which the best `top_k` score."""

    num: int
    top_k: int


@dataclass(frozen=True)
class AssistantConfig:
    """An assistant's sizes and choices.

    Attributes:
        backbone_size: hidden size of the target that it was trained for.
        hidden_size, intermediate_size, vocab_size: its own.
        num_heads: query heads of every layer.
        layer_types: `sliding_attention` or `full_attention` a layer.
        head_dims: elements a head, by layer type.
        sliding_window: keys that a sliding layer sees.
        ropes: rotary embedding by layer type, as `rope_parameters` writes them.
        eps: of the norms.
        act: name of the activation.
        attention_bias: whether the projections of queries and outputs have a bias.
        attention_soft_cap, logits_soft_cap: of attention scores and of logits; None is no cap.
        is_tied: the head is the table `model.embed_tokens`.
        centroids: of an ordered head; None for a dense one.
        where: path of the config, for errors.
    """

    backbone_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    layer_types: tuple[str, ...]
    head_dims: Mapping[str, int]
    sliding_window: int
    ropes: Mapping[str, Mapping[str, Any]]
    eps: float
    act: str
    attention_bias: bool
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    is_tied: bool
    centroids: Centroids | None
    where: str

    @classmethod
    def read(cls, config: ConfigReader) -> AssistantConfig:
        """Read the whole `config.json`, of either kind of assistant.

        Raises:
            CheckpointError: a size is missing or wrong, or the layers are not those of an
                assistant.
        """
        text = config.section("text_config")
        _refuse_foreign_parts(text)
        layer_types = _layer_types(text)
        vocab_size = text.integer("vocab_size")
        default_backbone, default_window = 1536, 512
        if config.config.get("model_type") == UNIFIED:
            default_backbone, default_window = 3840, 1024
        # Keys and values are the target's, so that their heads are, too.
        text.accept("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v")
        return cls(
            backbone_size=config.integer("backbone_hidden_size", default_backbone),
            hidden_size=text.integer("hidden_size"),
            intermediate_size=text.integer("intermediate_size"),
            vocab_size=vocab_size,
            num_heads=text.integer("num_attention_heads"),
            layer_types=layer_types,
            head_dims=_head_dims(text, layer_types),
            sliding_window=text.integer("sliding_window", default_window),
            ropes=_ropes(text, layer_types),
            eps=text.number("rms_norm_eps", 1e-6),
            act=text.text("hidden_activation", "gelu_pytorch_tanh"),
            attention_bias=text.flag("attention_bias", False),
            attention_soft_cap=text.number("attn_logit_softcapping", None),
            logits_soft_cap=text.number("final_logit_softcapping", None),
            is_tied=config.flag("tie_word_embeddings", True),
            centroids=_centroids(config, vocab_size),
            where=config.where,
        )


def _refuse_foreign_parts(text: ConfigReader) -> None:
    """Parts that a Gemma 4 text model may have and its assistants do not."""
    num_layers = text.integer("num_hidden_layers")
    for key, got, allowed in (
        (
            "hidden_size_per_layer_input",
            text.integer("hidden_size_per_layer_input", 0, minimum=0),
            (0,),
        ),
        (
            "vocab_size_per_layer_input",
            text.integer("vocab_size_per_layer_input", 0, minimum=0),
            (0,),
        ),
        ("enable_moe_block", text.flag("enable_moe_block", False), (False,)),
        ("use_double_wide_mlp", text.flag("use_double_wide_mlp", False), (False,)),
        (
            "num_kv_shared_layers",
            text.integer("num_kv_shared_layers", 0, minimum=0),
            (0, num_layers),
        ),
        (
            "use_bidirectional_attention",
            text.text("use_bidirectional_attention", None),
            (None, "vision"),
        ),
    ):
        if got not in allowed:
            raise CheckpointError(
                "an assistant has a part that its kind does not have",
                where=f"{text.where}, key {key!r}",
                got=f"{got!r}; allowed: {' or '.join(map(repr, allowed))}",
                fix="use a Gemma 4 assistant: dense layers, all of them on the target's keys and "
                "values",
            )
    text.accept("num_experts", "top_k_experts", "moe_intermediate_size")


def _layer_types(text: ConfigReader) -> tuple[str, ...]:
    num_layers = text.integer("num_hidden_layers")
    types = text.texts("layer_types")
    if types is None:
        types = tuple(FULL if i % FULL_EVERY == 0 else SLIDING for i in range(1, num_layers + 1))
    if len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise CheckpointError(
            "the layer types of a config do not describe its layers",
            where=f"{text.where}, layer_types",
            got=f"{list(types)} for {num_layers} layers; allowed: {FULL} or {SLIDING} a layer",
            fix="use the config.json that belongs to the weights",
        )
    return (*types[:-1], FULL)  # The last one sees everything, whatever is declared.


def _head_dims(text: ConfigReader, layer_types: tuple[str, ...]) -> Mapping[str, int]:
    """By layer type; newer configs list what differs from `head_dim` layer by layer."""
    head_dim = text.integer("head_dim", 256)
    if "per_layer_config" not in text:
        return {SLIDING: head_dim, FULL: text.integer("global_head_dim", 512)}
    text.accept("global_head_dim")
    found: dict[str, set[int]] = {}
    layers = text.section("per_layer_config")
    for index, kind in enumerate(layer_types):
        own = layers.section(str(index))
        own.accept("num_key_value_heads")
        found.setdefault(kind, set()).add(own.integer("head_dim", head_dim))
        if unread := own.unread():
            raise CheckpointError(
                "a layer of an assistant differs from the others in what cannot differ",
                where=own.where,
                got=f"{', '.join(unread)}; allowed: head_dim, num_key_value_heads",
                fix="use a Gemma 4 assistant",
            )
    for kind, sizes in found.items():
        if len(sizes) > 1:
            raise CheckpointError(
                "layers of one type have heads of several sizes",
                where=f"{layers.where}, head_dim of {kind} layers",
                got=f"{sorted(sizes)}; allowed: one size a layer type",
                fix="use the config.json that belongs to the weights",
            )
    return {kind: sizes.pop() for kind, sizes in found.items()}


def _ropes(text: ConfigReader, layer_types: tuple[str, ...]) -> Mapping[str, Mapping[str, Any]]:
    text.accept("rope_parameters")
    if "rope_parameters" not in text:
        return DEFAULT_ROPES
    given = text.config["rope_parameters"]
    is_by_type = isinstance(given, Mapping) and all(
        isinstance(given.get(kind), Mapping) for kind in layer_types
    )
    if not is_by_type:
        raise CheckpointError(
            "the rotary embeddings of a config are not told by layer type",
            where=f"{text.where}, rope_parameters",
            got=f"{given!r}; allowed: an object for each of {', '.join(sorted(set(layer_types)))}",
            fix="use the config.json that belongs to the weights",
        )
    return {kind: {**DEFAULT_ROPES[kind], **given[kind]} for kind in set(layer_types)}


def _centroids(config: ConfigReader, vocab_size: int) -> Centroids | None:
    found = Centroids(
        config.integer("num_centroids", 2048), config.integer("centroid_intermediate_top_k", 32)
    )
    if not config.flag("use_ordered_embeddings", False):
        return None
    if vocab_size % found.num or found.top_k > found.num:
        raise CheckpointError(
            "the centroids of an ordered head do not fit its vocabulary",
            where=f"{config.where}, num_centroids and centroid_intermediate_top_k",
            got=f"{found.num} and {found.top_k} for a vocabulary of {vocab_size}; allowed: a "
            "divisor of the vocabulary, and at most as many",
            fix="use the config.json that belongs to the weights",
        )
    return found
