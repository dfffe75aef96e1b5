"""The objects of a `config.json` that describe a head, in each of the forms it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg_eagle.recognition import architectures_of

__all__ = ["ConfigParts", "reduced_vocab_size"]


class ConfigParts(NamedTuple):
    """Where to read a head's config.

    Attributes:
        head: what is special about the head; its `report` covers `decoder` too.
        decoder: sizes of the decoder layers and of the target's vocabulary.
        is_speculators: whether the `speculators` library wrote it.
    """

    head: ConfigReader
    decoder: ConfigReader
    is_speculators: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> ConfigParts:
        """Of a flat config, one with the base model's under `model`, or one of `speculators`."""
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            head = ConfigReader(config, where)
            return cls(head, head.section("transformer_layer_config"), True)
        if config.get("model_type") == "eagle" and isinstance(config.get("model"), Mapping):
            outer = {k: v for k, v in config.items() if k != "model" and v is not None}
            config = {**outer, **config["model"], **_without(outer, "model_type", "architectures")}
        head = ConfigReader(config, where)
        head.accept("method", "parallel_drafting")
        return cls(head, head, False)

    def family(self, families: Mapping[str, str]) -> str:
        """The family of the head by its architecture; by its `model_type` where it names none.

        Raises:
            CheckpointError: a family that is not known.
        """
        model_type = self.decoder.text("model_type", "llama")
        names = architectures_of(self.head.config)
        known = set(families.values())
        if self.is_speculators or not names or names == ("PEagleDraftModel",):
            if model_type in known:
                return model_type
            raise self._unknown(f"model_type {model_type!r}", known)
        for name in names:
            if name in families:
                return families[name]
        raise self._unknown(f"architecture {', '.join(names)!r}", set(families))

    def _unknown(self, got: str, known: set[str]) -> CheckpointError:
        return CheckpointError(
            "an EAGLE head of this architecture cannot be run",
            where=self.head.where,
            got=f"{got}; allowed: {', '.join(sorted(known))}",
            fix="use a head of one of these architectures, or install a plugin that serves it",
        )


def reduced_vocab_size(config: Mapping[str, Any], where: str) -> int | None:
    """Columns of the head where they are fewer than the target's tokens; None otherwise.

    Raises:
        CheckpointError: one of the two sizes is no number.
    """
    parts = ConfigParts.of(config, where)
    reduced = parts.head.integer("draft_vocab_size", None)
    if reduced is None:
        reduced = parts.head.integer("truncated_vocab_size", None)
    if reduced is None:
        return None
    vocab_size = parts.decoder.integer("vocab_size", None)
    return reduced if vocab_size is None or reduced < vocab_size else None


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
