"""LiLiCorr against the values of independent implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay

CASE, FORM = "lilicorr-1", "checkpoint_hf"
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize("chunk", [None, 4, 1])
def test_every_round_walks_the_expected_candidates_by_the_expected_scores(
    chunk: int | None, tmp_path: Path
) -> None:
    case = GoldenCase(CASE)
    replay = Replay(case, {"method": "dflash"}, tmp_path, form=FORM)
    speculator: Any = replay.speculator
    calls: list[tuple[Any, ...]] = []
    speculator.lattice.register_forward_hook(lambda _m, inputs, out: calls.append((*inputs, out)))
    for index, proposed in replay.rounds(chunk):

        def expected(name: str, index: int = index) -> torch.Tensor:
            return case.tensor(index, name)

        assert proposed.tokens == expected("draft_tokens").tolist()
        assert proposed.ids is not None
        assert torch.equal(proposed.ids, expected("candidate_ids"))
        hidden, embedded, log_probs, context, has_context, edges = calls[-1]
        torch.testing.assert_close(hidden[0], expected("block_hidden")[1:], **CLOSE)
        torch.testing.assert_close(log_probs[0], expected("candidate_log_probs"), **CLOSE)
        torch.testing.assert_close(context[0], expected("anchor_context"), **CLOSE)
        assert has_context.tolist() == [True]
        torch.testing.assert_close(edges[0], expected("edge_scores"), **CLOSE)
        torch.testing.assert_close(proposed.logits, expected("walk_scores"), **CLOSE)
        assert proposed.positions == expected("block_positions")[1:].tolist()

        for invalid in (context, torch.full_like(context, torch.nan)):
            edges = speculator.lattice(hidden, embedded, log_probs, invalid, ~has_context)
            torch.testing.assert_close(edges[0], expected("edge_scores_invalid_anchor"), **CLOSE)
