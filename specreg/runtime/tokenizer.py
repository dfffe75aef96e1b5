"""Text in, text out: a thin wrapper of the target's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Tokenizer", "eos_token_ids"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """Encodes prompts as they stand, with the special tokens that the tokenizer itself adds."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer beside the weights; None when there is none."""
        if not any((directory / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(directory, local_files_only=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out, spaces left as the tokens have them."""
        # Tidying up spaces would change text that a stream has already shown.
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence token."""
        return None if (eos := self._tokenizer.eos_token_id) is None else int(eos)


def eos_token_ids(
    tokenizer: Tokenizer | None, *configs: Mapping[str, Any] | None
) -> frozenset[int]:
    """Every end-of-sequence token that the tokenizer or one of the model's configs names."""
    found: set[int] = set()
    for value in (
        tokenizer.eos_token_id if tokenizer is not None else None,
        *(config.get("eos_token_id") for config in configs if config),
    ):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, Sequence):
            found.update(value)
    return frozenset(found)
