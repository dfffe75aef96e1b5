"""What an EAGLE-1 head's `config.json` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specreg.config_reader import ConfigReader
from specreg.nn.shape import DecoderShape
from specreg_eagle.config_parts import ConfigParts
from specreg_eagle.recognition import EAGLE1_FAMILIES

__all__ = ["Eagle1Config"]


@dataclass(frozen=True)
class Eagle1Config:
    """An EAGLE-1 or EAGLE-2 head, which have the same weights.

    Attributes:
        reader: to report from when everything is read.
        shape: of the decoder layers; biases of attention are those that the config states.
        vocab_size: rows of its embedding.
        fc_bias: whether the projection has a bias; None where the config does not say.
        has_attention_bias: the same for queries, keys and values.
        has_outer_norms: layer 0 normalises its input, and a final norm its output (Mistral).
        logit_scale: factor on the logits.
    """

    reader: ConfigReader
    shape: DecoderShape
    vocab_size: int
    fc_bias: bool | None
    has_attention_bias: bool | None
    has_outer_norms: bool
    logit_scale: float

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Eagle1Config:
        """Read a config. Raises `CheckpointError`, also for families that are not known."""
        parts = ConfigParts.of(config, where)
        reader = parts.head
        return cls(
            reader=reader,
            shape=DecoderShape.read(parts.decoder),
            vocab_size=parts.decoder.integer("vocab_size"),
            fc_bias=_stated(reader, "bias"),
            has_attention_bias=_stated(reader, "attention_bias", "qkv_bias"),
            has_outer_norms=parts.family(EAGLE1_FAMILIES) == "mistral",
            logit_scale=reader.number("logit_scale", 1.0),
        )


def _stated(config: ConfigReader, *keys: str) -> bool | None:
    """The first of some flags that the config has; None without any."""
    found = [config.flag(key, False) for key in keys if key in config]
    return found[0] if found else None
