"""Heads and steps of DSpark drafters, against their formulas written out once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_cases import Change, Watched, load
from golden_cases import MAX_MODEL_LEN, GoldenCase, Replay
from specreg_dspark.loop import walk
from torch import Tensor

from specreg.testing.batches import prompt_batch

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
RANK, HIDDEN = 16, 64
FORM = "checkpoint_dense"


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def gated(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["markov_head_type"] = "gated"
    tensors["markov_head.gate_proj.weight"] = randn(RANK, HIDDEN + RANK) * 0.3
    tensors["markov_head.gate_proj.bias"] = randn(RANK)


def keys(**entries: Any) -> Change:
    return lambda tensors, config: config.update(entries)


def test_a_gated_head_gates_the_embedding_by_row_and_token(tmp_path: Path) -> None:
    watched = Watched("dspark-1", FORM, tmp_path, gated)
    w = {name: t.double() for name, t in watched.speculator.markov.state_dict().items()}
    for index, proposed in watched.replay.rounds():
        hidden = watched.case.tensor(index, "block_hidden").double()
        before = w["markov_w1.weight"][watched.before(index, proposed.tokens)]
        seen = torch.cat((hidden, before), dim=-1)
        gate = 1 / (1 + torch.exp(-(seen @ w["gate_proj.weight"].T + w["gate_proj.bias"])))
        bias = (gate * before) @ w["markov_w2.weight"].T
        expected = watched.case.tensor(index, "base_logits") + bias.float()
        torch.testing.assert_close(proposed.logits, expected, **CLOSE)
        assert proposed.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("scale", "cap"), [(0.5, None), (1.0, 3.0), (2.0, 4.0)], ids=["scale", "cap", "both"]
)
def test_scale_and_soft_cap_act_on_base_and_bias_each_by_itself(
    scale: float, cap: float | None, tmp_path: Path
) -> None:
    change = keys(logit_scale=scale, final_logit_softcapping=cap)
    watched = Watched("dspark-1", FORM, tmp_path, change)
    markov = watched.speculator.markov

    def shaped(x: Tensor) -> Tensor:
        return scale * (x if cap is None else cap * torch.tanh(x / cap))

    for index, proposed in watched.replay.rounds():
        bias = markov.bias(markov.embed(watched.before(index, proposed.tokens)))
        base = watched.case.tensor(index, "base_logits")
        torch.testing.assert_close(proposed.logits, shaped(base) + shaped(bias), **CLOSE)
        if cap is not None:
            together = shaped(base + bias)
            assert (proposed.logits - together).abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_is_rounded_and_then_the_sum(dtype: torch.dtype, tmp_path: Path) -> None:
    watched = Watched("dspark-1", "checkpoint", tmp_path, dtype=dtype)
    speculator = watched.speculator
    num_differing = 0
    for index, proposed in watched.replay.rounds():
        features = speculator.markov.embed(watched.before(index, proposed.tokens))
        base = speculator.base_logits(watched.rows)[0]
        exact = features.double() @ speculator.markov.markov_w2.weight.double().T
        bias = torch.cat([speculator.markov.bias(row[None]) for row in features])
        assert base.dtype == bias.dtype == proposed.logits.dtype == dtype
        torch.testing.assert_close(bias.double(), exact, atol=0.02, rtol=2**-7)
        assert torch.equal(proposed.logits, (base.float() + bias.float()).to(dtype))
        once = (base.double() + exact).to(dtype)
        num_differing += int((once != proposed.logits).sum())
    assert num_differing > 10  # rounding once is another rule, which this test tells apart


def test_the_confidence_head_is_fp32_in_a_run_of_bf16(tmp_path: Path) -> None:
    watched = Watched("dspark-1", "checkpoint", tmp_path, dtype=torch.bfloat16)
    heads = watched.speculator.head.state_dict()
    dtypes = {name: tensor.dtype for name, tensor in heads.items()}
    confidence = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert confidence == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    fp32 = load("dspark-1", tmp_path / "fp32").head.state_dict()
    assert all(torch.equal(heads[name], fp32[name]) for name in confidence)
    for _, proposed in watched.replay.rounds():
        assert watched.confidence.dtype == torch.float32
        assert watched.confidence.shape == (1, len(proposed.tokens))


@pytest.mark.parametrize("case", ["dspark-1", "dspark-2"])
def test_a_confidence_depends_on_the_drafts_before_and_on_no_other(
    case: str, tmp_path: Path
) -> None:
    """The head of dspark-1 reads the token before, that of dspark-2 the row alone."""
    watched = Watched(case, "checkpoint", tmp_path)
    speculator = watched.speculator
    changed: Any = None

    def proposed_by(hidden: Tensor, anchors: Tensor, block: Any) -> Any:
        nonlocal changed
        output = type(speculator).propose_block(speculator, hidden, anchors, block)
        drafts = speculator._drafts
        changed = []
        for step in range(4):
            others = output.tokens.clone()
            others[:, step] = (others[:, step] + 1) % 96
            speculator._drafts = lambda *_, told=others: told
            again = type(speculator).propose_block(speculator, hidden, anchors, block)
            changed.append((again.confidence != output.confidence)[0].tolist())
        speculator._drafts = drafts
        return output

    speculator.propose_block = proposed_by
    next(watched.replay.rounds())
    reads_markov = case == "dspark-1"
    assert changed == [[reads_markov and k == step + 1 for k in range(4)] for step in range(4)]


def test_a_config_without_a_confidence_head_has_no_confidences(tmp_path: Path) -> None:
    watched = Watched("dspark-1", FORM, tmp_path, keys(enable_confidence_head=False))
    for index, proposed in watched.replay.rounds():
        assert watched.confidence is None
        assert proposed.tokens == watched.case.tensor(index, "draft_tokens").tolist()


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("case", ["dspark-1", "dspark-2"])
def test_candidates_are_the_best_columns_before_any_bias(case: str, k: int, tmp_path: Path) -> None:
    watched = Watched(case, "checkpoint", tmp_path, dspark_draft_topk=k)
    speculator = watched.speculator
    target_ids = speculator._candidate_ids
    assert speculator.target_ids is None
    for index, proposed in watched.replay.rounds():
        best = watched.case.tensor(index, "base_logits").topk(k)
        ids = best.indices if target_ids is None else target_ids[best.indices]
        assert proposed.ids is not None
        assert proposed.ids.tolist() == ids.tolist()
        before = speculator.markov.embed(watched.before(index, proposed.tokens))
        bias = speculator.markov.bias(before).gather(1, best.indices)
        torch.testing.assert_close(proposed.logits, best.values + bias, **CLOSE)
        drawn = ids.gather(1, proposed.logits.argmax(-1, keepdim=True))
        assert proposed.tokens == drawn.flatten().tolist()


def test_many_candidates_are_drawn_from_rows_that_are_empty_elsewhere(tmp_path: Path) -> None:
    k = 140
    watched = Watched("dspark-1", "checkpoint", tmp_path, dspark_draft_topk=k)
    for index, proposed in watched.replay.rounds():
        best = watched.case.tensor(index, "base_logits").topk(k).indices
        is_candidate = torch.zeros(4, 160, dtype=torch.bool).scatter(1, best, True)
        assert torch.equal(proposed.logits.isfinite(), is_candidate)
        assert (proposed.logits[~is_candidate] == -torch.inf).all()
        assert proposed.ids is None


@pytest.mark.parametrize(("case", "num_rows"), [("dspark-1", 2), ("dspark-2", 3)])
def test_fewer_drafts_have_fewer_rows(case: str, num_rows: int, tmp_path: Path) -> None:
    watched = Watched(case, "checkpoint", tmp_path, num_speculative_tokens=2)
    for index, proposed in watched.replay.rounds():
        assert watched.hidden.shape[1] == num_rows
        first = watched.case.integer(index, "anchor_position") + 1
        assert proposed.positions == [first, first + 1]


@pytest.mark.parametrize("room", range(6))
@pytest.mark.parametrize("case", ["dspark-1", "dspark-2"])
def test_near_the_end_of_the_positions_drafts_end(case: str, room: int, tmp_path: Path) -> None:
    replay = Replay(GoldenCase(case), {"method": "dspark"}, tmp_path)
    length, k = MAX_MODEL_LEN - 1 - room, replay.num_speculative_tokens
    batch = prompt_batch(
        [[7] * length],
        [1],
        [3],
        num_draft_tokens=k,
        temperature=replay.temperature,
        seeds=replay.seeds,
    )
    batch.aux_hidden_states = randn(length, len(replay.needs.aux_layer_ids) * HIDDEN)
    tokens = replay._propose(batch).tokens
    assert [token >= 0 for token in tokens] == [step < room for step in range(k)]


def test_a_request_that_drafts_nothing_is_walked_over(tmp_path: Path) -> None:
    """Its tokens are -1, which embed as any token does; nobody reads what comes of it."""
    markov = load("dspark-1", tmp_path).markov
    drafts = walk(
        markov,
        randn(2, 3, HIDDEN),
        torch.tensor([5, 0]),
        lambda step, features: torch.tensor([step, -1]),
    )
    assert drafts.tolist() == [[0, 1, 2], [-1, -1, -1]]
