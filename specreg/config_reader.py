"""Typed reads of a `config.json` that remember what was read, so that the rest can be reported."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload

from specreg.errors import CheckpointError

__all__ = ["ConfigReader"]

_Default = TypeVar("_Default")
_REQUIRED: Any = object()

logger = logging.getLogger(__name__)

# Written by libraries into any config; none of them changes the arithmetic of a drafter.
BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


class ConfigReader:
    """One object of a `config.json`. A key that is null counts as absent.

    Args:
        config: the object.
        where: path of the file and the object in it, for errors.

    Attributes:
        config, where: as given.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self._read: set[str] = set()
        self._defaults: dict[str, Any] = {}
        self._sections: dict[str, ConfigReader] = {}

    def __contains__(self, key: str) -> bool:
        """Whether the key has a value; does not count as reading it."""
        return self.config.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` where the key is absent."""
        self._read.add(key)
        value = self.config.get(key)
        if value is not None:
            return value
        if default is not None and default is not _REQUIRED:
            self._defaults[key] = default
        return default

    @overload
    def integer(self, key: str, *, minimum: int = 1) -> int: ...
    @overload
    def integer(self, key: str, default: _Default, *, minimum: int = 1) -> int | _Default: ...
    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        """An integer of at least `minimum`. Raises `CheckpointError`; so do the others."""
        value = self._value(key, default)
        if value is not default and (type(value) is not int or value < minimum):
            raise self._wrong(key, value, f"an integer of at least {minimum}")
        return value

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: _Default) -> float | _Default: ...
    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number, as float."""
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: _Default) -> str | _Default: ...
    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self._value(key, default)
        if value is not default and not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers of at least 0; None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(i) is not int or i < 0 for i in value):
            raise self._wrong(key, value, "a list of integers of at least 0")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(not isinstance(i, str) for i in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def section(self, key: str) -> ConfigReader:
        """The object under a key; an empty one where the key is absent."""
        if key not in self._sections:
            value = self.get(key, {})
            if not isinstance(value, Mapping):
                raise self._wrong(key, value, "an object")
            self._sections[key] = ConfigReader(value, f"{self.where}, {key}")
        return self._sections[key]

    def accept(self, *keys: str) -> None:
        """Count keys as read that say nothing a drafter has to act on."""
        self._read.update(keys)

    def report(self) -> None:
        """Log keys that nothing has read, as a warning, and the defaults of those that are absent.

        Called once, when everything has been read: a setting that another library would honour is
        not lost in silence.
        """
        if unread := self.unread():
            logger.warning("%s: keys that nothing reads: %s", self.where, ", ".join(unread))
        if defaults := dict(self._defaulted()):
            told = ", ".join(f"{key} = {value!r}" for key, value in sorted(defaults.items()))
            logger.info("%s: keys that are absent, with what is taken: %s", self.where, told)

    def unread(self) -> list[str]:
        """Keys that nothing has read, sorted, nested ones as `section.key`; null ones are none."""
        return sorted(self._unread())

    def _unread(self) -> Iterator[str]:
        for key, value in self.config.items():
            if key in self._sections:
                yield from (f"{key}.{inner}" for inner in self._sections[key]._unread())
            elif key not in self._read and key not in BOOKKEEPING and value is not None:
                yield key

    def _defaulted(self) -> Iterator[tuple[str, Any]]:
        for key, value in self._defaults.items():
            if key not in self._sections:
                yield key, value
        for name, section in self._sections.items():
            for key, value in section._defaulted():
                yield f"{name}.{key}", value

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(
                f"a checkpoint's config lacks {key!r}",
                where=self.where,
                got=f"keys {', '.join(sorted(self.config)) or 'none'}; allowed: {key!r} among them",
                fix="use the config.json that belongs to the weights",
            )
        return value

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint's config has a wrong {key!r}",
            where=f"{self.where}, key {key!r}",
            got=f"{value!r}; allowed: {allowed}",
            fix="use the config.json that belongs to the weights",
        )
