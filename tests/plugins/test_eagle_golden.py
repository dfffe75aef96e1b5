"""EAGLE heads against recorded cases: the drafts and the logits of every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay
from specreg_eagle.speculator import EagleSpeculator
from torch import Tensor

from specreg.drafters.self_feeding import DraftStates
from specreg.speculator import KVRows, ProposeInputs

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
CASES = [
    ("eagle1-1", "checkpoint", "eagle"),
    ("eagle3-1", "checkpoint", "eagle3"),
    ("eagle3-1", "checkpoint_research", "eagle3"),
    ("eagle3-2", "checkpoint", "eagle3"),
    ("eagle3-3", "checkpoint", "eagle3"),
    ("peagle-1", "checkpoint", "peagle"),
    ("peagle-1", "checkpoint", "eagle3"),
]
FORMS = pytest.mark.parametrize(("name", "form", "method"), CASES)


def replay(case: GoldenCase, method: str, directory: Path, form: str = "checkpoint", **keys: Any):
    return Replay(case, {"method": method}, directory, form=form, **keys)


@FORMS
@pytest.mark.parametrize("chunk", [None, 4, 1])
def test_tokens_and_logits_are_those_recorded(
    name: str, form: str, method: str, chunk: int | None, tmp_path: Path
) -> None:
    case = GoldenCase(name)
    for index, proposed in replay(case, method, tmp_path, form).rounds(chunk):
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist(), index
        logits = case.tensor(index, "draft_logits")
        torch.testing.assert_close(proposed.logits, logits, **TOLERANCE)
        first = case.integer(index, "anchor_position") + 1
        assert proposed.positions == list(range(first, first + len(proposed.tokens)))
