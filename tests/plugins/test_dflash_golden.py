"""DFlash against the values of independent implementations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import GoldenCase, Replay

CASES = [
    ("dflash-1", "checkpoint"),
    ("dflash-1", "checkpoint_hf"),
    ("dflash-2", "checkpoint"),
    ("dflash-2", "checkpoint_hf"),
    ("dflash-3", "checkpoint_hf"),
]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("chunk", [None, 4, 1])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_every_round_drafts_the_expected_tokens_from_the_expected_logits(
    name: str, form: str, chunk: int | None, tmp_path: Path
) -> None:
    case = GoldenCase(name)
    replay = Replay(case, {"method": "dflash"}, tmp_path, form=form)
    for index, proposed in replay.rounds(chunk):
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
        torch.testing.assert_close(proposed.logits, case.tensor(index, "draft_logits"), **CLOSE)
        assert proposed.positions == case.tensor(index, "block_positions")[1:].tolist()
