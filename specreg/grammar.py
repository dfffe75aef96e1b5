"""What constrains a request's output to a language: which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Grammar", "allowed_bitmasks"]


class Grammar(Protocol):
    """The constraint of one request, asked on rank 0 while a step is planned."""

    def bitmask(self, output_token_ids: Sequence[int]) -> bytes:
        """Tokens that may follow, as little-endian 32-bit words.

        Bit `t % 32` of word `t // 32` is set when token `t` is allowed. Tokens behind the last word
        are forbidden, and bits behind the vocabulary ignored. A mask that allows nothing ends the
        request with `finish_reason: "error"`.

        Args:
            output_token_ids: what the request has emitted and, behind it, drafts. Each of them was
                allowed by an earlier mask, unless drafts are verified synthetically.
        """
        ...


def allowed_bitmasks(
    grammar: Grammar, output_token_ids: Sequence[int], drafts: Sequence[int]
) -> list[bytes]:
    """A mask a logits row: row `i` decides the token behind drafts `0 .. i-1`.

    A row behind a forbidden draft decides nothing, since that draft is rejected; it repeats the
    mask before it, and the grammar is never asked about what it has ruled out.
    """
    masks = [grammar.bitmask(list(output_token_ids))]
    prefix = list(output_token_ids)
    is_reachable = True
    for draft in drafts:
        is_reachable = is_reachable and _allows(masks[-1], draft)
        prefix.append(draft)
        masks.append(grammar.bitmask(list(prefix)) if is_reachable else masks[-1])
    return masks


def _allows(mask: bytes, token: int) -> bool:
    byte = token >> 3
    return byte < len(mask) and bool(mask[byte] >> (token & 7) & 1)
