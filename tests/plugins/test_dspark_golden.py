"""DSpark against the values of independent implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dspark_cases import Watched
from golden_cases import GoldenCase
from specreg_dspark.loop import walk
from torch import Tensor

CASES = [
    ("dspark-1", "checkpoint"),
    ("dspark-1", "checkpoint_dense"),
    ("dspark-2", "checkpoint"),
    ("dspark-2", "checkpoint_dense"),
    ("dspark-3", "checkpoint"),
]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("chunk", [None, 4, 1])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_round_drafts_the_expected_tokens_from_the_expected_logits(
    name: str, form: str, chunk: int | None, tmp_path: Path
) -> None:
    watched = Watched(name, form, tmp_path)
    case, speculator = watched.case, watched.speculator
    for index, proposed in watched.replay.rounds(chunk):
        expected = {key: case.tensor(index, key) for key in ("draft_logits", "confidence")}
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
        torch.testing.assert_close(proposed.logits, expected["draft_logits"], **CLOSE)
        torch.testing.assert_close(watched.confidence[0], expected["confidence"], **CLOSE)
        hidden = case.tensor(index, "block_hidden")
        torch.testing.assert_close(watched.hidden[0], hidden, **CLOSE)
        base = speculator.base_logits(watched.rows)[0]
        torch.testing.assert_close(base, case.tensor(index, "base_logits"), **CLOSE)
        first = case.integer(index, "anchor_position") + 1
        assert proposed.positions == list(range(first, first + len(proposed.tokens)))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_behind_other_tokens_logits_and_confidences_are_the_expected_ones(
    name: str, form: str, tmp_path: Path
) -> None:
    """The walk is told what was drawn: random tokens in place of its own."""
    watched = Watched(name, form, tmp_path)
    case, speculator = watched.case, watched.speculator
    for index, _ in watched.replay.rounds():
        before = case.tensor(index, "tf_prev_ids")
        base = case.tensor(index, "base_logits")
        logits = []

        def told(step: int, features: Tensor) -> Tensor:
            logits.append(base[step] + speculator.markov.bias(features)[0])  # noqa: B023
            return before[step + 1 : step + 2] if step + 1 < len(before) else before[:1]  # noqa: B023

        walk(speculator.markov, watched.rows, before[:1], told)
        torch.testing.assert_close(torch.stack(logits), case.tensor(index, "tf_logits"), **CLOSE)
        confidence = speculator.confidence(watched.rows, speculator.markov.embed(before)[None])
        expected = case.tensor(index, "tf_confidence")
        torch.testing.assert_close(confidence[0], expected, **CLOSE)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_candidates_that_are_all_columns_draw_as_the_whole_row(
    name: str, form: str, tmp_path: Path
) -> None:
    """160 columns are more than are kept as pairs; 96 are kept so, under the target's ids."""
    num_columns = GoldenCase(name).facts["draft_vocab"]
    watched = Watched(name, form, tmp_path, dspark_draft_topk=num_columns)
    for index, proposed in watched.replay.rounds():
        assert proposed.tokens == watched.case.tensor(index, "draft_tokens").tolist()
        logits, ids = proposed.logits, proposed.ids
        expected = watched.case.tensor(index, "draft_logits")
        if ids is not None:
            offsets = watched.speculator._candidate_ids
            columns = torch.searchsorted(offsets, ids)
            logits = torch.empty_like(expected).scatter(1, columns, logits)
        assert (ids is not None) == (num_columns == 96)
        torch.testing.assert_close(logits, expected, **CLOSE)
