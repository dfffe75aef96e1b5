"""Each processor against a loop over single rows, in batches of requests that all differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.logits_processors import (
    AllowedTokenBitmask,
    AllowedTokenIds,
    LogitBias,
    LogitsProcessor,
    Penalties,
)

V = 37  # no multiple of 32
# Slot, and the drafts of its request; 11 has none and 4 no parameters anywhere below.
REQUESTS = {6: [5, 5, 9], 2: [1, 36], 4: [8, 8, 8], 11: [], 0: [5]}


def rows_of(requests: dict[int, list[int]] = REQUESTS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random logits, and the three maps that `apply` takes."""
    slots, local_pos, judged = [], [], []
    for slot, drafts in requests.items():
        slots += [slot] * (len(drafts) + 1)
        local_pos += range(len(drafts) + 1)
        judged += [*drafts, -1]
    logits = 3 * torch.randn(len(slots), V, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1, 4] = float("nan"), -torch.inf
    return logits, torch.tensor(slots), torch.tensor(local_pos), torch.tensor(judged)


def processed(processor: LogitsProcessor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Rows of each slot before and after."""
    logits, slots, local_pos, judged = rows_of()
    before = logits.clone()
    processor.apply(logits, slots, local_pos, judged)
    return (
        {slot: before[slots == slot] for slot in REQUESTS},
        {slot: logits[slots == slot] for slot in REQUESTS},
    )


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def assert_others_untouched(
    processor: LogitsProcessor, before: dict[int, Tensor], after: dict[int, Tensor]
) -> None:
    for slot in REQUESTS.keys() - processor.slots:
        assert_same_bits(after[slot], before[slot])


def test_a_bias_is_added_in_every_row_of_its_request() -> None:
    biases = {6: {3: 2.5, 4: 1.0, 36: -100.0}, 11: {0: 7.0}, 0: {5: 0.25}}
    processor = LogitBias("cpu")
    for slot, bias in biases.items():
        processor.set(slot, bias)
    before, after = processed(processor)
    for slot, bias in biases.items():
        expected = before[slot].clone()
        for token, value in bias.items():
            expected[:, token] += value
        assert_same_bits(after[slot], expected)
    assert_others_untouched(processor, before, after)


def test_only_allowed_ids_keep_their_logits() -> None:
    processor = AllowedTokenIds("cpu")
    processor.set(2, [36, 0, 0])
    processor.set(11, [7])
    before, after = processed(processor)
    for slot, allowed in ((2, [0, 36]), (11, [7])):
        expected = torch.full_like(before[slot], -torch.inf)
        expected[:, allowed] = before[slot][:, allowed]
        assert_same_bits(after[slot], expected)
    assert_others_untouched(processor, before, after)


def penalised(
    row: Tensor, prompt: list[int], emitted: list[int], factors: dict[str, float]
) -> Tensor:
    """One row by the book, token by token."""
    row = row.clone()
    for token in range(V):
        count = emitted.count(token)
        if count or token in prompt:
            repetition = factors.get("repetition", 1.0)
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= factors.get("frequency", 0.0) * count
        row[token] -= factors.get("presence", 0.0) * (count > 0)
    return row


HISTORIES: dict[int, dict[str, Any]] = {
    6: {"prompt": [1, 9, 9], "output": [5, 2], "repetition": 1.5, "frequency": 0.125},
    2: {"prompt": [36], "output": [1, 1, 4], "presence": 0.5, "frequency": 0.25},
    11: {"prompt": [0, 36], "output": [36, 36], "repetition": 0.5, "frequency": -2.0},
    0: {"prompt": [5], "output": [], "presence": 1.5, "repetition": 2.0},
}


def test_each_row_counts_the_drafts_before_it_as_emitted() -> None:
    processor = Penalties(V, "cpu")
    for slot, history in HISTORIES.items():
        processor.set(slot, **history)
    before, after = processed(processor)
    for slot, history in HISTORIES.items():
        factors = {k: v for k, v in history.items() if k not in ("prompt", "output")}
        for i in range(len(REQUESTS[slot]) + 1):
            emitted = history["output"] + REQUESTS[slot][:i]
            expected = penalised(before[slot][i], history["prompt"], emitted, factors)
            torch.testing.assert_close(
                after[slot][i], expected, rtol=1e-6, atol=1e-6, equal_nan=True
            )
            # What a row that counts its own draft, or none, would get is something else.
            if i < len(REQUESTS[slot]):
                wrong = penalised(
                    before[slot][i], history["prompt"], emitted + REQUESTS[slot][i : i + 1], factors
                )
                assert not torch.allclose(after[slot][i], wrong, equal_nan=True)
    assert_others_untouched(processor, before, after)


def test_what_was_sampled_counts_from_the_next_step_on_and_padding_does_not() -> None:
    counted, told = Penalties(V, "cpu"), Penalties(V, "cpu")
    counted.set(2, prompt=[7], output=[1], presence=0.5, frequency=0.25)
    told.set(2, prompt=[7], output=[1, 0, 36, 0], presence=0.5, frequency=0.25)
    sampled = torch.tensor([[3, -1, -1], [0, 36, 0], [-1, -1, -1]])
    counted.count([4, 2, 0], sampled)
    assert_same_bits(processed(counted)[1][2], processed(told)[1][2])


def test_a_draft_that_is_no_token_counts_for_nothing() -> None:
    processor = Penalties(V, "cpu")
    processor.set(2, prompt=[7], frequency=2.0)
    logits, slots, local_pos, _ = rows_of({2: [0, 0]})
    before = logits.clone()
    processor.apply(logits, slots, local_pos, torch.tensor([-1, V, -1]))
    assert_same_bits(logits, before)


def words_of(allowed_rows: list[set[int]], num_words: int) -> Tensor:
    """int32 masks, built from Python integers."""
    rows = []
    for allowed in allowed_rows:
        bits = sum(1 << token for token in allowed if token < 32 * num_words)
        rows.append(list(bits.to_bytes(4 * num_words, "little")))
    return torch.tensor(rows, dtype=torch.uint8).view(len(rows), 4 * num_words).view(torch.int32)


@pytest.mark.parametrize("num_words", [2, 1, 3])
def test_masks_follow_the_real_drafts_and_a_width_that_does_not_match_forbids(
    num_words: int,
) -> None:
    masks = {
        6: [{0, 1, 31}, {32, 36}, set(range(V)), {5, 33}],
        11: [{31, 35, 36}],
    }
    processor = AllowedTokenBitmask()
    for slot, rows in masks.items():
        processor.set(slot, words_of(rows, num_words))
    before, after = processed(processor)
    for slot, rows in masks.items():
        for i, allowed in enumerate(rows):
            expected = torch.full((V,), -torch.inf)
            for token in allowed:
                if token < 32 * num_words:
                    expected[token] = before[slot][i, token]
            assert_same_bits(after[slot][i], expected)
    assert_others_untouched(processor, before, after)


def test_a_mask_of_other_rows_than_the_request_has_is_refused() -> None:
    processor = AllowedTokenBitmask()
    processor.set(6, words_of([{1}] * 3, 2))
    with pytest.raises(TensorError, match="slot 6") as error:
        processed(processor)
    assert "3 rows of words; allowed: 4" in error.value.got


def test_a_released_slot_keeps_nothing_and_a_reused_one_only_its_own() -> None:
    bias, ids, mask, penalties = (
        LogitBias("cpu"),
        AllowedTokenIds("cpu"),
        AllowedTokenBitmask(),
        Penalties(V, "cpu"),
    )
    bias.set(2, {1: 5.0})
    ids.set(2, [1])
    mask.set(2, words_of([{1}] * 3, 2))
    penalties.set(2, prompt=[1], repetition=2.0)
    processors: tuple[LogitsProcessor, ...] = (bias, ids, mask, penalties)
    for processor in processors:
        processor.release(2)
        processor.release(2)
        assert not processor.slots
        before, after = processed(processor)
        assert_others_untouched(processor, before, after)
    bias.set(2, {3: 1.0})
    bias.set(2, {4: 1.0})
    before, after = processed(bias)
    assert_same_bits(after[2][:, 3], before[2][:, 3])
