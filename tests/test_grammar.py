"""Masks for a request's drafts."""

from __future__ import annotations

from collections.abc import Sequence

from specreg.grammar import allowed_bitmasks


class Counting:
    """Allows the token after the newest one, and refuses to be asked about anything else."""

    def bitmask(self, output_token_ids: Sequence[int]) -> bytes:
        assert list(output_token_ids) == list(range(len(output_token_ids)))
        return (1 << len(output_token_ids)).to_bytes(4, "little")


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def test_each_row_is_asked_with_the_drafts_before_it() -> None:
    masks = allowed_bitmasks(Counting(), [0, 1], [2, 3])
    assert [allowed(mask) for mask in masks] == [{2}, {3}, {4}]


def test_without_drafts_there_is_one_mask() -> None:
    assert [allowed(mask) for mask in allowed_bitmasks(Counting(), [0], [])] == [{1}]


def test_a_grammar_is_not_asked_about_what_it_has_forbidden() -> None:
    masks = allowed_bitmasks(Counting(), [0], [1, 7, 3])
    assert [allowed(mask) for mask in masks] == [{1}, {2}, {2}, {2}]


def test_a_draft_behind_the_mask_is_forbidden() -> None:
    assert len(allowed_bitmasks(Counting(), [], [99, 1])) == 3
