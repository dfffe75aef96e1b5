"""Several MTP modules, one a step: drafts, and what is left in the KV after verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, Replay
from mtp_families import FAMILIES, KV_HEADS
from mtp_harness import SLOT, Harness
from mtp_reference import one_module_a_step
from safetensors.torch import load_file
from specreg_mtp.multi_module import MultiModuleSpeculator
from specreg_mtp.single_module import SingleModuleSpeculator
from specreg_mtp.window import DraftWindow

from specreg.config import SpeculativeConfig
from specreg.errors import CheckpointError, ConfigError
from specreg.registry import get_registry
from specreg.speculator import KVRows
from specreg.testing import save_random_checkpoint

LONG = (3, 9, 1, 14, 5, 5, 12, 2, 8, 8, 1, 6, 3, 13)
ROUNDS = ((0, 6), (1, 11), (3, 1), (2, 7), (0, 3), (3, 3), (1, 9))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
NAMES = [name for name, family in FAMILIES.items() if len(family.numbers) > 1]


def harness_of(name: str, tmp_path: Path, num_steps: int = 3) -> tuple[Harness, Any]:
    weights = FAMILIES[name].save(tmp_path)
    harness = Harness({"method": "mtp", "model": str(tmp_path)}, num_steps)
    assert harness.spec.name == "multi_module_mtp"
    return harness, weights


def kept_kv(harness: Harness, module: int, length: int) -> torch.Tensor:
    """Keys and values of a module at the slot's positions 0 to `length - 1`."""
    pool = harness.pool
    blocks = pool.block_table[SLOT].long()
    rows = [pool.keys[module][blocks].flatten(0, 1), pool.values[module][blocks].flatten(0, 1)]
    assert len(rows[0]) >= length
    return torch.stack(rows)[:, :length]


def fresh_kv(harness: Harness, length: int) -> list[torch.Tensor]:
    """The same of a pass of every module over everything that is decided, in empty KV."""
    target, drafter = harness.target, harness.speculator.drafter
    pool, tokens = harness.make_pool(), torch.tensor(harness.tokens)
    states, found = target.states(harness.tokens[:-1]), []
    for module in range(min(harness.num_steps, length)):
        count = length - module
        positions = torch.arange(count)
        rows = KVRows.causal(torch.full((count,), SLOT), positions, (0, count))
        ids = tokens[1 + module : 1 + module + count]
        states = drafter.run(module, ids, states[:count], rows, pool.view()).to_feed
        blocks = pool.block_table[SLOT].long()
        both = [part[module][blocks].flatten(0, 1) for part in (pool.keys, pool.values)]
        found.append(torch.stack(both)[:, :count])
    return found


def assert_kv_is_fresh(harness: Harness) -> None:
    """Module s is right on every row p of at most P - s."""
    length = len(harness.tokens) - 1
    for module, wanted in enumerate(fresh_kv(harness, length)):
        got = kept_kv(harness, module, length - module)
        torch.testing.assert_close(got, wanted, **TOLERANCE, msg=f"module {module}")


def assert_drafts_are_the_references(harness: Harness, weights: Any, name: str) -> None:
    family, target = FAMILIES[name], harness.target
    drafts, logits = one_module_a_step(
        weights,
        family.facts,
        harness.tokens,
        target.states(harness.tokens[:-1]),
        target.embedding,
        target.head,
        family.numbers[: harness.num_steps],
        KV_HEADS,
    )
    torch.testing.assert_close(harness.logits, logits, **TOLERANCE)
    assert harness.drafts == drafts


@pytest.mark.parametrize("chunk", [None, 2, 7])
@pytest.mark.parametrize("length", [1, 2, 5, 14])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_and_kv_are_those_of_a_full_pass(
    name: str, length: int, chunk: int | None, tmp_path: Path
) -> None:
    harness, weights = harness_of(name, tmp_path)
    harness.prompt(LONG[:length], 4, chunk)
    for num_accepted, newest in (*ROUNDS, (0, 0)):
        assert_drafts_are_the_references(harness, weights, name)
        assert_kv_is_fresh(harness)
        harness.verified(num_accepted, newest)


def test_two_modules_of_three_serve_two_steps(tmp_path: Path) -> None:
    harness, weights = harness_of("glm", tmp_path, num_steps=2)
    harness.prompt(LONG, 4, 5)
    for accepted in (0, 2, 1, 0, 1):
        assert_drafts_are_the_references(harness, weights, "glm")
        harness.verified(accepted, 5)


def test_drafts_that_were_proposed_and_not_verified_leave_nothing_behind(tmp_path: Path) -> None:
    harness, weights = harness_of("glm", tmp_path)
    harness.prompt(LONG[:4], 4)
    for num_drafts in (0, 0, 1, 0, 2, 3, 0):
        harness.verified(min(1, num_drafts), 6, num_drafts)
        assert_drafts_are_the_references(harness, weights, "glm")
        assert_kv_is_fresh(harness)


def test_without_the_kept_rows_the_kv_goes_wrong(tmp_path: Path) -> None:
    # What the tests above are able to see: the same rounds, with what is kept dropped each time.
    harness, _ = harness_of("glm", tmp_path)
    harness.prompt(LONG, 4)
    harness.speculator.release(SLOT)
    harness.verified(0, 6)
    harness.speculator.release(SLOT)
    harness.verified(1, 6)
    with pytest.raises(AssertionError, match="module"):
        assert_kv_is_fresh(harness)


def test_a_slot_that_is_free_again_starts_from_nothing(tmp_path: Path) -> None:
    harness, weights = harness_of("glm", tmp_path)
    harness.prompt(LONG, 4)
    harness.verified(1, 6)
    harness.speculator.release(SLOT)
    harness.prompt(LONG[3:5], 2)
    assert_drafts_are_the_references(harness, weights, "glm")
    harness.verified(0, 6)
    assert_drafts_are_the_references(harness, weights, "glm")


def test_addresses_are_fixed_and_replaying_draft_reads_them_anew(tmp_path: Path) -> None:
    harness, _ = harness_of("glm", tmp_path)
    window: DraftWindow = harness.speculator.window
    before = {name: t.data_ptr() for name, t in vars(window).items() if isinstance(t, torch.Tensor)}
    harness.prompt(LONG, 4)
    first = harness.logits.clone()
    harness.speculator.draft(3)  # A replay: reads the buffers, writes the same again.
    steps = harness.sampler.steps
    assert torch.equal(torch.stack([steps[s] for s in sorted(steps)]), first)
    harness.verified(2, 6)
    after = {name: t.data_ptr() for name, t in vars(window).items() if isinstance(t, torch.Tensor)}
    assert before == after


@pytest.mark.parametrize("name", ["a plain target", "glm"])
def test_nothing_is_drafted_or_written_at_positions_out_of_reach(name: str, tmp_path: Path) -> None:
    FAMILIES[name].save(tmp_path)
    harness = Harness({"method": "mtp", "model": str(tmp_path)}, max_model_len=8)
    harness.prompt(LONG[:6], 4)
    for _ in range(5):
        harness.verified(0, 6)
    assert harness.drafts == [-1, -1, -1]
    for module in range(len(harness.needs.kv_specs)):
        assert not kept_kv(harness, module, 16)[:, 8:].any()


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_one_module_repeated_is_the_other_scheme_of_the_golden_case(
    chunk: int | None, tmp_path: Path
) -> None:
    """MiMo-V2 connects its parts as that case does; so three copies under its names are it."""
    case = GoldenCase("mtp-1")
    weights = load_file(case.checkpoint("checkpoint", tmp_path) / "model.safetensors")
    stems = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
    }
    copies = {}
    for name, weight in weights.items():
        stem, _, rest = name.removeprefix("mtp_layers.0.").partition(".")
        for module in range(3):
            copies[f"model.mtp.layers.{module}.{stems.get(stem, stem)}.{rest}"] = weight.clone()
    config = {
        "model_type": "mimo_v2",
        "num_nextn_predict_layers": 3,
        "use_qk_norm": True,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": case.facts["rope_theta"],
        "vocab_size": 160,
        "rms_norm_eps": 1e-6,
    }
    directory = save_random_checkpoint(tmp_path / "copies", config, {}, integers=copies)
    replay = Replay(case, {"method": "mtp", "model": str(directory)}, tmp_path)
    assert isinstance(replay.speculator, MultiModuleSpeculator)
    for index, proposed in replay.rounds(chunk):
        wanted = case.tensor(index, "parallel_logits")
        torch.testing.assert_close(proposed.logits, wanted, **TOLERANCE)
        assert proposed.tokens == case.tensor(index, "parallel_tokens").tolist()


def select(config: dict[str, Any], num_steps: int | None) -> Any:
    keys: dict[str, Any] = {"method": "mtp", "model": "draft"}
    if num_steps is not None:
        keys["num_speculative_tokens"] = num_steps
    return get_registry().select(SpeculativeConfig.parse(keys), config, {})


def test_more_steps_than_modules_are_refused_when_planning() -> None:
    config = FAMILIES["glm"].full_config()
    with pytest.raises(ConfigError, match="4; allowed: 1 to 3"):
        select(config, 4)


def test_by_default_a_proposal_has_as_many_steps_as_there_are_modules() -> None:
    selection = select(FAMILIES["glm"].full_config(), None)
    assert selection.speculative.num_speculative_tokens == 3
    assert selection.spec.name == "multi_module_mtp"


@pytest.mark.parametrize(("num_steps", "lookahead"), [(1, 1), (2, 2), (3, 3)])
def test_a_prompt_is_read_with_as_much_look_ahead_as_modules_run(
    num_steps: int, lookahead: int
) -> None:
    selection = select(FAMILIES["glm"].full_config(), num_steps)
    needs = selection.spec.needs_for(selection.setup)
    assert (needs.prefill_lookahead, len(needs.kv_specs)) == (lookahead, num_steps)


def test_rows_that_are_read_again_stay_behind_a_window() -> None:
    selection = select(FAMILIES["step"].full_config(), 3)
    needs = selection.spec.needs_for(selection.setup)
    assert [spec.sliding_window for spec in needs.kv_specs] == [7, 7, 7]


def test_one_step_takes_the_first_of_several_modules(tmp_path: Path) -> None:
    harness, weights = harness_of("glm", tmp_path, num_steps=1)
    assert isinstance(harness.speculator, SingleModuleSpeculator)
    harness.prompt(LONG, 4)
    assert_drafts_are_the_references(harness, weights, "glm")


def saved(tmp_path: Path, numbers: Sequence[int], declared: int | None) -> dict[str, Any]:
    family = FAMILIES["glm"]
    config = {**family.config, "num_nextn_predict_layers": declared}
    replace(family, numbers=numbers, config=config).save(tmp_path)
    return {"method": "mtp", "model": str(tmp_path)}


def test_an_export_that_declares_more_modules_than_it_holds_applies_its_one(tmp_path: Path) -> None:
    harness = Harness(saved(tmp_path, (2,), 3), 3)
    assert isinstance(harness.speculator, SingleModuleSpeculator)


def test_fewer_modules_than_steps_are_refused_at_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"modules \[0, 1\] for num_speculative_tokens 3"):
        Harness(saved(tmp_path, (2, 3), 3), 3)


def test_modules_beyond_what_the_config_declares_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(saved(tmp_path, (2, 3, 4), None), 5)
    assert isinstance(harness.speculator, SingleModuleSpeculator)
    assert "MTP modules [1, 2] do not run: the config declares 1" in caplog.text
