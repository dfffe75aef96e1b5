"""The MTP speculators against golden cases: tokens equal, logits within tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import GoldenCase, Replay

TOLERANCE = 1e-4
FORMS = (
    ("mtp-1", "checkpoint"),
    ("mtp-2", "checkpoint"),
    ("mtp-2", "checkpoint_native"),
    ("mtp-3", "checkpoint_native"),
)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_module_drafts_what_the_references_draft(
    name: str, form: str, chunk: int | None, tmp_path: Path
) -> None:
    case = GoldenCase(name)
    replay = Replay(case, {"method": "mtp"}, tmp_path, form=form)
    num_rounds = 0
    for index, proposed in replay.rounds(chunk):
        num_rounds += 1
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
        expected = case.tensor(index, "draft_logits")
        torch.testing.assert_close(proposed.logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
        anchor = case.integer(index, "anchor_position")
        assert proposed.positions == [anchor + 1 + step for step in range(len(expected))]
    assert num_rounds == case.num_rounds
