"""EAGLE heads against recorded cases: the drafts and the logits of every round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay

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


@FORMS
def test_states_on_the_way_are_those_recorded(
    name: str, form: str, method: str, tmp_path: Path
) -> None:
    case = GoldenCase(name)
    replayed = replay(case, method, tmp_path, form)
    speculator: Any = replayed.speculator
    run, read_target = speculator.run, speculator.read_target
    passes, fused = [], []

    def recorded_run(*args: Any) -> Any:
        passes.append((args, run(*args)))
        return passes[-1][1]

    def recorded_read_target(inputs: Any) -> Any:
        fused.append(read_target(inputs))
        return fused[-1]

    speculator.run, speculator.read_target = recorded_run, recorded_read_target
    for index, _ in replayed.rounds():
        last = case.integer(index, "num_valid_rows") - 1
        drafting = passes[1:]
        score, feed = (
            torch.cat([states[0][last : last + 1], *states[1:]])
            for states in zip(*(states for _, states in passes), strict=True)
        )
        ids, positions = (
            torch.cat([rows[0][last : last + 1], *rows[1:]])
            for rows in zip(*((args[0], args[2].positions) for args, _ in passes), strict=True)
        )
        expected = {
            "draft_hidden": score,
            "draft_hidden_normed": score,
            "draft_hidden_prenorm": None if case.facts.get("norm_output") else feed,
            "draft_row_positions": positions,
            "draft_row_ids": ids,
            "fused_hidden_last_row": fused[0][last],
        }
        assert len(drafting) == (1 if "peagle" in name else len(score) - 1)
        compared = 0
        for tensor, found in expected.items():
            if found is not None and case.has(index, tensor):
                torch.testing.assert_close(found, case.tensor(index, tensor), **TOLERANCE)
                compared += 1
        assert compared >= 2
        passes.clear()
        fused.clear()


@FORMS
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2e-2), ("float16", 5e-3)])
def test_logits_in_half_precision_are_near_those_recorded(
    name: str, form: str, method: str, dtype: str, limit: float, tmp_path: Path
) -> None:
    """Relative error of the logits of each draft whose predecessors are those recorded."""
    case = GoldenCase(name)
    replayed = replay(case, method, tmp_path, form, dtype=getattr(torch, dtype))
    num_compared = 0
    for index, proposed in replayed.rounds():
        tokens, logits = (case.tensor(index, f"draft_{what}") for what in ("tokens", "logits"))
        for step, (found, recorded) in enumerate(zip(proposed.logits, logits, strict=True)):
            assert found.dtype == getattr(torch, dtype)
            error = (found.float() - recorded).norm() / recorded.norm()
            assert error < limit, (index, step)
            num_compared += 1
            if proposed.tokens[step] != tokens[step] and name != "peagle-1":
                break
    assert num_compared >= 2 * case.num_rounds
