"""XPress against the values of independent implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay
from specreg_dflash.xpress.refiner import KeptColumns, refinements
from torch import Tensor

FORMS = ["checkpoint", "checkpoint_vllm"]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def case() -> GoldenCase:
    return GoldenCase("xpress-1")


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_round_drafts_the_expected_tokens_from_the_expected_logits(
    case: GoldenCase, form: str, chunk: int | None, tmp_path: Path
) -> None:
    replay = Replay(case, {"method": "dflash"}, tmp_path, form=form)
    for index, proposed in replay.rounds(chunk):
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
        refined = case.tensor(index, "anchor_prev.refined_logits")[-1]
        torch.testing.assert_close(proposed.logits, refined, **CLOSE)


def test_with_few_candidates_every_round_drafts_the_expected_tokens(
    case: GoldenCase, tmp_path: Path
) -> None:
    topc = case.facts["topc"]
    replay = Replay(case, {"method": "dflash", "xpress_topc": topc}, tmp_path)
    for index, proposed in replay.rounds():
        assert proposed.tokens == case.tensor(index, "anchor_prev.topc_jacobi_tokens")[-1].tolist()
        is_candidate = proposed.logits > -torch.inf
        candidates = case.tensor(index, "topc_candidates").sort(-1).values
        assert is_candidate.nonzero()[:, 1].view(-1, topc).tolist() == candidates.tolist()


@pytest.mark.parametrize("rule", ["anchor_prev", "true_prev"])
@pytest.mark.parametrize("form", FORMS)
def test_every_pass_refines_as_expected(
    case: GoldenCase, form: str, rule: str, tmp_path: Path
) -> None:
    speculator: Any = Replay(case, {"method": "dflash"}, tmp_path, form=form).speculator
    for index in range(1, case.num_rounds + 1):
        anchor = case.tensor(index, "anchor_id")[None]
        before = anchor
        if rule == "true_prev":
            before = case.tensor(index, "prev_token_before_anchor")[None]
        hidden, base = (case.tensor(index, n)[None] for n in ("block_hidden", "base_logits"))

        def passes(
            num_candidates: int,
            given: tuple[Tensor, ...] = (hidden, base, anchor, before),
        ) -> Tensor:
            rows, logits, *tokens = given
            kept = KeptColumns.of(logits, num_candidates)
            found = refinements(speculator.head, rows, kept, *tokens, num_passes=4)
            return torch.cat([kept.spread(scores, logits.shape[-1]) for scores in found])

        everything, few = passes(0), passes(case.facts["topc"])
        torch.testing.assert_close(
            everything, case.tensor(index, f"{rule}.refined_logits"), **CLOSE
        )
        expected = case.tensor(index, f"{rule}.jacobi_tokens")
        assert torch.equal(everything.argmax(-1), expected)
        expected = case.tensor(index, f"{rule}.topc_jacobi_tokens")
        assert torch.equal(few.argmax(-1), expected)
        assert torch.equal(base[0].argmax(-1), case.tensor(index, "base_tokens"))
