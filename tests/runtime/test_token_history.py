"""Token histories by slot, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.runtime.batch import Batch
from specreg.runtime.step import ScheduledRow
from specreg.runtime.token_history import TokenHistory

CPU = torch.device("cpu")
K = 3


def step(history: TokenHistory, *rows: tuple[ScheduledRow, list[int]]) -> list[list[int]]:
    """What is known after rows that emitted some tokens; without the padding."""
    batch = Batch.pack([row for row, _ in rows], K, CPU)
    counts = torch.tensor([len(emitted) for _, emitted in rows])
    sampled = torch.tensor([emitted + [-1] * (K + 1 - len(emitted)) for _, emitted in rows])
    known = history.update(batch, sampled, counts)
    assert known.dtype == torch.int64
    return [_without_padding(row) for row in known]


def _without_padding(row: Tensor) -> list[int]:
    tokens: list[int] = row[row >= 0].tolist()
    assert row.tolist() == tokens + [-1] * (len(row) - len(tokens))
    return tokens


def reads(slot: int, start: int, tokens: list[int], num_logits: int = 1) -> ScheduledRow:
    return ScheduledRow(slot, start, tokens, num_logits, 0)


def test_chunks_accepted_drafts_and_the_newest_token_add_up_and_rejected_drafts_vanish() -> None:
    history = TokenHistory(4, 32, CPU)
    assert step(history, (reads(2, 0, [5, 6], 0), [])) == [[5, 6]]
    known = step(history, (reads(2, 2, [7]), [11]), (reads(0, 0, [8, 9]), [12]))
    assert known == [[5, 6, 7, 11], [8, 9, 12]]
    known = step(
        history,
        (reads(0, 2, [12, 20, 21, 22], 4), [20, 21, 22, 13]),
        (reads(2, 3, [11, 30, 31, 32], 4), [30, 14]),
    )
    assert known == [[8, 9, 12, 20, 21, 22, 13], [5, 6, 7, 11, 30, 14]]
    assert step(history, (reads(2, 5, [14]), [15])) == [[5, 6, 7, 11, 30, 14, 15]]


def test_a_slot_that_changes_hands_shows_nothing_of_the_last_request() -> None:
    history = TokenHistory(1, 32, CPU)
    step(history, (reads(0, 0, [5, 6, 7, 8]), [9]))
    assert step(history, (reads(0, 0, [1], 0), [])) == [[1]]
    assert step(history, (reads(0, 1, [2]), [3])) == [[1, 2, 3]]


def test_padding_rows_show_nothing_and_write_nothing() -> None:
    history = TokenHistory(2, 32, CPU)
    step(history, (reads(1, 0, [5, 6]), [7]))
    padding = ScheduledRow(-1, 0, [0], 0, 0)
    assert step(history, (padding, []), (padding, [])) == [[], []]
    assert step(history, (reads(1, 2, [7]), [8])) == [[5, 6, 7, 8]]


def test_tokens_behind_the_longest_request_are_dropped() -> None:
    history = TokenHistory(1, 4, CPU)
    assert step(history, (reads(0, 0, [1, 2, 3, 4], 2), [4, 5])) == [[1, 2, 3, 4]]
    assert TokenHistory.num_bytes(1, 4) == 20
