"""XPress beyond its golden cases: passes, short blocks, options, and that it never keeps logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import load
from golden_cases import GoldenCase, Replay
from specreg_dflash.xpress.config import RefinerConfig
from specreg_dflash.xpress.refiner import KeptColumns, Refiner, refinements
from torch import Tensor

from specreg.config import EngineConfig
from specreg.errors import ConfigError, PolicyError
from specreg.model_config import read_model_config
from specreg.policy import resolve
from specreg.runtime.loading import load_models
from specreg.runtime.tensor_parallel import TensorParallel
from specreg.testing import save_kit_target, save_random_drafter

NUM_REQS, NUM_DRAFTS, HIDDEN, VOCAB, RANK, BLOCK = 3, 4, 8, 29, 6, 7


@pytest.fixture
def refiner() -> Refiner:
    torch.manual_seed(0)
    made = Refiner(RefinerConfig(RANK, 2 * RANK, BLOCK, 1, 0), HIDDEN, VOCAB)
    made.to_empty(device="cpu").requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.6)
    made.fold_mixer()
    return made


@pytest.fixture
def block() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows, base logits and anchors."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(NUM_REQS, NUM_DRAFTS + 1, HIDDEN, generator=generator),
        torch.randn(NUM_REQS, NUM_DRAFTS, VOCAB, generator=generator),
        torch.randint(VOCAB, (NUM_REQS,), generator=generator),
    )


def refined(refiner: Refiner, block: tuple[Tensor, ...], passes: int, few: int = 0) -> list[Tensor]:
    hidden, base, anchors = block
    kept = KeptColumns.of(base, few)
    found = refinements(refiner, hidden, kept, anchors, anchors, num_passes=passes)
    return [kept.spread(scores, VOCAB) for scores in found]


def one_by_one(refiner: Refiner, block: tuple[Tensor, ...], num_rows: int) -> list[list[int]]:
    """Greedy tokens, each scored when those before it stand; the mixer written out."""
    hidden, base, anchors = block
    w = {name: parameter.double() for name, parameter in refiner.named_parameters()}
    proposals = []
    for request in range(NUM_REQS):
        y = hidden[request, :num_rows].double()
        mean = y.mean(0) @ w["down_g.weight"].T
        tokens = [int(anchors[request])]
        states: list[Tensor] = []
        for row in range(num_rows):
            previous = tokens[max(0, row - 1)]
            parts = (y[row] @ w["down_h.weight"].T, mean, w["token_embed.weight"][previous])
            states.append(torch.cat(parts) @ w["in_proj.weight"].T)
            mixed = states[row] + sum(w["mix_l"][:, row, j] * states[j] for j in range(row + 1))
            gate = torch.nn.functional.silu(mixed @ w["mlp.gate_proj.weight"].T)
            inner = gate * (mixed @ w["mlp.up_proj.weight"].T)
            refined_state = mixed + inner @ w["mlp.down_proj.weight"].T
            if row:
                scores = base[request, row - 1] + refined_state @ w["readout.weight"].T
                tokens.append(int(scores.argmax()))
        proposals.append(tokens[1:])
    return proposals


@pytest.mark.parametrize("num_drafts", [1, 2, NUM_DRAFTS])
def test_as_many_passes_as_drafts_give_what_one_draft_after_another_gives(
    refiner: Refiner, block: tuple[Tensor, Tensor, Tensor], num_drafts: int
) -> None:
    """Fewer rows than the mixer was trained for take its leading part, not other strides."""
    hidden, base, anchors = block
    short = hidden[:, : num_drafts + 1], base[:, :num_drafts], anchors
    scores = refined(refiner, short, num_drafts)[-1]
    assert scores.argmax(-1).tolist() == one_by_one(refiner, short, num_drafts + 1)


def test_after_a_pass_one_more_token_is_final(
    refiner: Refiner, block: tuple[Tensor, Tensor, Tensor]
) -> None:
    final = torch.tensor(one_by_one(refiner, block, NUM_DRAFTS + 1))
    passes = [scores.argmax(-1) for scores in refined(refiner, block, NUM_DRAFTS + 2)]
    for number, tokens in enumerate(passes, 1):
        assert torch.equal(tokens[:, :number], final[:, :number])
    assert any(not torch.equal(tokens, final) for tokens in passes[:-1])


def test_as_many_candidates_as_columns_change_nothing(
    refiner: Refiner, block: tuple[Tensor, Tensor, Tensor]
) -> None:
    everything, unlimited = refined(refiner, block, 3), refined(refiner, block, 3, few=VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(everything, unlimited, strict=True))
    limited = refined(refiner, block, 3, few=VOCAB - 1)
    assert all((scores == -torch.inf).sum(-1).eq(1).all() for scores in limited)
    torch.testing.assert_close(
        torch.where(limited[0] == -torch.inf, everything[0], limited[0]), everything[0]
    )


def test_passes_over_few_candidates_touch_no_other_column(
    refiner: Refiner, block: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The whole vocabulary is scored once, by the backbone."""
    hidden, base, anchors = block
    kept = KeptColumns.of(base, 3)
    assert kept.ids is not None
    ids, best = kept.ids.tolist(), base.argsort(-1, descending=True)[..., :3]
    assert ids == best.sort(-1).values.tolist()
    found = list(refinements(refiner, hidden, kept, anchors, anchors, num_passes=4))
    assert [scores.shape for scores in found] == [(NUM_REQS, NUM_DRAFTS, 3)] * 4
    whole = kept.spread(found[-1], VOCAB)
    assert torch.equal(whole.argmax(-1), kept.tokens(found[-1]))


@pytest.mark.parametrize("few", [0, 4])
def test_equal_scores_go_to_the_smallest_id_in_every_pass(few: int) -> None:
    base = torch.zeros(1, 1, 6)
    base[..., 1] = -1.0
    kept = KeptColumns.of(base, few)
    scores = torch.full_like(kept.logits, -2.0)
    scores[..., -3:] = 1.0
    expected = 3
    assert kept.tokens(scores).item() == expected
    assert kept.spread(scores, 6).argmax(-1).item() == expected


def test_a_large_batch_is_refined_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("specreg_dflash.xpress.speculator.MAX_GATHERED", 1)
    case = GoldenCase("xpress-1")
    keys = {"method": "dflash", "xpress_topc": case.facts["topc"]}
    replay = Replay(case, keys, tmp_path)
    speculator: Any = replay.speculator
    for index, proposed in replay.rounds():
        assert proposed.tokens == case.tensor(index, "anchor_prev.topc_jacobi_tokens")[-1].tolist()
    hidden = torch.randn(3, 5, 64)
    tokens = []
    for rows in ([0, 1, 2], [2], [1], [0]):
        replay.sampler.begin(
            torch.tensor(rows), torch.tensor(rows), replay.temperature, replay.seeds
        )
        positions = torch.zeros(len(rows), dtype=torch.int64)
        block = speculator.backbone.block(torch.tensor(rows), positions, 5, 64)
        anchors = torch.tensor(rows) + 1
        tokens.append(speculator.propose_block(hidden[rows], anchors, block).tokens)
    assert torch.equal(tokens[0], torch.cat(tokens[:0:-1]))


@pytest.mark.parametrize(
    ("stated", "option", "used"), [(None, None, 512), (7, None, 7), (7, 0, 0), (0, 9, 9)]
)
def test_the_option_wins_over_the_checkpoint(
    stated: int | None, option: int | None, used: int, tmp_path: Path
) -> None:
    speculative = {} if option is None else {"xpress_topc": option}
    speculator = load(
        "xpress-1",
        tmp_path,
        lambda tensors, config: config.update(xpress_topc=stated),
        "checkpoint_vllm",
        speculative=speculative,
    )
    assert speculator.num_candidates == used


@pytest.fixture
def drafter(tmp_path: Path) -> dict[str, Any]:
    target = save_kit_target(tmp_path / "target")
    speculative = save_random_drafter("xpress", tmp_path / "draft", str(target))
    return {"target": str(target), "speculative": speculative, "max_num_seqs": 4}


def config(drafter: dict[str, Any], **keys: Any) -> EngineConfig:
    speculative = drafter["speculative"] | keys.pop("speculative", {})
    return EngineConfig.parse(
        {**drafter, "tensor_parallel_size": 2, **keys, "speculative": speculative}
        | {"enable_batch_sharded_sampling": True}
    )


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_no_cache_is_ever_planned(drafter: dict[str, Any], method: str) -> None:
    plan = resolve(config(drafter, speculative={"draft_sample_method": method}))
    assert not plan.has_cache
    assert (plan.bytes_per_rank, plan.side_bytes_per_rank) == (0, 0)
    assert [verdict.rule for verdict in plan.failed_verdicts] == ["probabilistic-drafts"]
    if method == "probabilistic":
        assert "xpress" in plan.failed_verdicts[0].reason


def test_only_a_required_shard_is_an_error(drafter: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"speculative": {"draft_sample_method": "probabilistic"}}
    with pytest.raises(PolicyError, match="probabilistic-drafts"):
        resolve(config(drafter, draft_logits_sharding="require", **keys))


def test_a_watermarker_is_refused(drafter: dict[str, Any]) -> None:
    keys: dict[str, Any] = {"speculative": {"draft_sample_method": "probabilistic"}}
    asked = config(drafter, draft_watermarker="keyed-gumbel", tensor_parallel_size=1, **keys)
    with pytest.raises(ConfigError, match=r"watermark[^$]*xpress|xpress[^$]*watermark"):
        load_models(asked, TensorParallel())


def test_an_unknown_option_gets_the_nearest_spelling(drafter: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="xpress_topc"):
        resolve(config(drafter, speculative={"xpress_top_c": 3}))


def test_the_random_drafter_drafts_a_whole_block(drafter: dict[str, Any]) -> None:
    written = read_model_config(drafter["speculative"]["model"]) or {}
    assert resolve(config(drafter)).num_speculative_tokens == written["block_size"] - 1
