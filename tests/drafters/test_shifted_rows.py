from __future__ import annotations

import torch

from specreg.drafters.shifted_rows import ShiftedRows, shift_rows
from specreg.testing.batches import decode_batch, prompt_batch, with_padding

TEMPERATURE, SEEDS = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
COMMON = {"temperature": TEMPERATURE, "seeds": SEEDS, "num_draft_tokens": 3}


def rows(shifted: ShiftedRows) -> list[tuple[int, int, int]]:
    """(slot, position, token) of the rows that are not inert."""
    address = shifted.kv_rows
    listed = zip(
        address.slots.tolist(), address.positions.tolist(), shifted.token_ids.tolist(), strict=True
    )
    return [row for row in listed if row[0] >= 0]


def test_each_row_holds_the_token_that_followed_it():
    batch = prompt_batch([[10, 11, 12]], [2], [13], lookahead=[[-1]], **COMMON)
    shifted = shift_rows(batch, 16)
    assert rows(shifted) == [(2, 0, 11), (2, 1, 12), (2, 2, 13)]
    assert shifted.last_rows.tolist() == [2]
    assert shifted.last_positions.tolist() == [2]


def test_in_the_middle_of_a_prompt_the_next_prompt_token_follows():
    batch = prompt_batch([[10, 11]], [2], [-1], lookahead=[[12]], **COMMON)
    assert rows(shift_rows(batch, 16)) == [(2, 0, 11), (2, 1, 12)]


def test_rejected_rows_are_inert_and_the_last_kept_one_takes_the_newest_token():
    batch = decode_batch(
        [[13, 20, 21, 22], [33, 40, 41, 42]], [3, 7], [2, 0], [2, 0], [14, 34], **COMMON
    )
    shifted = shift_rows(_with_lookahead(batch), 16)
    assert rows(shifted) == [
        (2, 3, 20),
        (2, 4, 14),
        (0, 7, 40),
        (0, 8, 41),
        (0, 9, 42),
        (0, 10, 34),
    ]
    assert shifted.last_rows.tolist() == [1, 7]
    assert shifted.last_positions.tolist() == [4, 10]


def test_padding_rows_and_positions_beyond_the_limit_are_inert():
    batch = decode_batch([[13, 20, 21, 22]], [3], [2], [0], [14], **COMMON)
    padded, own = with_padding(_with_lookahead(batch), [0, 1])
    shifted = shift_rows(padded, 5)
    assert rows(shifted) == [(2, 3, 20), (2, 4, 21)]
    assert shifted.last_positions[own].tolist() == [6]
    assert (shifted.token_ids >= 0).all()


def _with_lookahead(batch):
    """The look-ahead that an engine passes; past the prompt it is -1."""
    batch.next_prefill_tokens = torch.full((1, batch.num_reqs), -1)
    return batch
