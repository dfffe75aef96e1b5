"""The text of a request while it grows, without halves of characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextDecoder"]

# What decoders put where bytes are no character, or not one yet.
REPLACEMENT = "\ufffd"


class TextDecoder:
    """Decodes tokens as they come; what is in `text` never changes again, and in the end it is the
    whole output decoded, where that is valid text.

    A token may hold a part of a character. Its bytes are held back until the character is complete,
    or until `finish`. New tokens are decoded behind those that came just before, as far back as
    their text may depend on them, so the work does not grow with the output.

    Args:
        decode: text of token ids.

    Attributes:
        text: of the tokens so far, whole characters only.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.text = ""
        self._window: list[int] = []  # tokens already in `text` that give context, then new ones
        self._num_known = 0
        self._num_known_characters = 0
        self._committed = ""  # the text before the window's new tokens

    def append(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens."""
        self._window += token_ids
        added = self._added()
        whole = added.rstrip(REPLACEMENT)
        self.text = self._committed + whole
        if added and whole == added:
            self._committed = self.text
            self._window = self._window[self._num_known :]
            self._num_known = len(self._window)
            self._num_known_characters = len(self._decode(self._window))

    def finish(self) -> None:
        """No token follows: what was held back is shown as it is."""
        self.text = self._committed + self._added()

    def _added(self) -> str:
        return self._decode(self._window)[self._num_known_characters :]
