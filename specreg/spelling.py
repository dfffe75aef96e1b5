"""Nearest spelling of an unknown name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["known_names", "nearest"]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is spelt most like `name`; None when none comes near."""
    by_folded = {candidate.lower().replace("-", "_"): candidate for candidate in sorted(known)}
    matches = get_close_matches(name.lower().replace("-", "_"), by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def known_names(name: str, known: Iterable[str]) -> str:
    """The tail of a message about `name`: the nearest spelling first, then everything known."""
    names = sorted(set(known))
    listing = ", ".join(names) if names else "none"
    match = nearest(name, names)
    return f"known: {listing}" if match is None else f"did you mean {match!r}? known: {listing}"
