"""The plugin `draft_model`: what it declares, and the rows it reads after verification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from specreg_draft_model.expanded_prefill import ExpandedPrefill, expand_prefill

from specreg.capabilities import DraftingStyle, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.errors import CheckpointError
from specreg.plugin import DraftSetup
from specreg.registry import get_registry
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
from specreg.speculator import ProposeInputs
from specreg.testing.tiny_models import save_tiny_model

NOTHING = torch.empty(0)


def inputs(
    queries: list[list[int]],
    starts: list[int],
    slots: list[int],
    num_sampled: list[int],
    num_rejected: list[int],
    last_sampled: list[int],
) -> ProposeInputs:
    offsets = [0]
    for query in queries:
        offsets.append(offsets[-1] + len(query))
    positions = [start + i for start, q in zip(starts, queries, strict=True) for i in range(len(q))]
    return ProposeInputs(
        input_ids=torch.tensor([token for query in queries for token in query]),
        positions=torch.tensor(positions),
        query_start_loc=tuple(offsets),
        idx_mapping=torch.tensor(slots),
        sample_idx_mapping=torch.tensor(slots),
        num_sampled=torch.tensor(num_sampled),
        num_rejected=torch.tensor(num_rejected),
        last_sampled=torch.tensor(last_sampled),
        next_prefill_tokens=torch.empty(0, len(slots), dtype=torch.int64),
        num_draft_tokens=torch.full((len(slots),), 3),
        temperature=NOTHING,
        seeds=NOTHING,
    )


def rows(prefill: ExpandedPrefill) -> list[tuple[int, int, int]]:
    """(slot, position, token) of every row that is not inert."""
    kv = prefill.kv_rows
    triples = zip(kv.slots.tolist(), kv.positions.tolist(), prefill.input_ids.tolist(), strict=True)
    return [triple for triple in triples if triple[0] >= 0]


def test_accepted_tokens_and_the_newest_one_are_read_and_rejected_ones_are_not() -> None:
    # Verified [t4, d1, d2, d3] at 4..7; d1 was accepted, then 60 was sampled at position 6.
    prefill = expand_prefill(inputs([[40, 51, 52, 53]], [4], [2], [2], [2], [60]), max_model_len=64)
    assert rows(prefill) == [(2, 4, 40), (2, 5, 51), (2, 6, 60)]
    assert prefill.last_positions.tolist() == [6]
    assert prefill.input_ids[prefill.last_rows].tolist() == [60]
    assert prefill.kv_rows.query_start_loc == (0, 5)


def test_a_fresh_prompt_a_full_acceptance_and_a_chunk_share_a_batch() -> None:
    prefill = expand_prefill(
        inputs(
            [[10, 11, 12], [20, 21], [30, 31, 32, 33]],
            [0, 7, 16],
            [5, 0, 3],
            [1, 2, 0],
            [0, 0, 0],
            [13, 22, -1],
        ),
        max_model_len=64,
    )
    assert rows(prefill) == [
        *[(5, 0, 10), (5, 1, 11), (5, 2, 12), (5, 3, 13)],
        *[(0, 7, 20), (0, 8, 21), (0, 9, 22)],
        *[(3, 16, 30), (3, 17, 31), (3, 18, 32), (3, 19, 33)],
    ]
    assert prefill.last_positions.tolist()[:2] == [3, 9]
    assert prefill.kv_rows.query_start_loc == (0, 4, 7, 12)


def test_nothing_is_read_through_a_padding_row_or_behind_the_longest_request() -> None:
    prefill = expand_prefill(
        inputs([[10, 11], [20]], [6, 0], [1, -1], [1, 0], [0, 0], [12, 0]), max_model_len=8
    )
    assert rows(prefill) == [(1, 6, 10), (1, 7, 11)]


def test_it_is_found_through_its_entry_point_and_opts_in_to_sharding() -> None:
    (found,) = [s for s in get_registry().speculators if "draft_model" in s.spec.methods]
    capabilities = found.spec.capabilities_for(DraftSetup())
    assert found.distribution == "specreg"
    assert capabilities.style is DraftingStyle.AUTOREGRESSIVE
    assert capabilities.honors_owner_mask
    assert capabilities.supports_probabilistic
    assert capabilities.layouts == {DraftLogitsLayout.DENSE}


def test_a_drafter_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path / "target")
    draft = save_tiny_model("llama", tmp_path / "draft", vocab_size=64)
    config = EngineConfig.parse(
        {
            "target": str(target),
            "max_model_len": 64,
            "speculative": {
                "method": "draft_model",
                "model": str(draft),
                "num_speculative_tokens": 2,
            },
        }
    )
    with pytest.raises(CheckpointError, match="64; allowed: the target's 101"):
        Engine.from_config(config)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt_oss"])
def test_a_drafter_of_another_architecture_changes_no_greedy_token(
    tmp_path: Path, kind: str
) -> None:
    target = save_tiny_model("mistral", tmp_path / "target")
    draft = save_tiny_model(kind, tmp_path / "draft", seed=3)
    config = {"target": str(target), "max_model_len": 64}
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    texts = ["hello", "a longer prompt than the window"]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    outputs = []
    for extra in ({}, {"speculative": speculative}):
        with Engine.from_config(EngineConfig.parse({**config, **extra})) as engine:
            outputs.append([output.token_ids for output in engine.generate(texts, params)])
    assert outputs[0] == outputs[1]


def test_a_request_outlives_the_positions_of_its_drafter(tmp_path: Path) -> None:
    target = save_tiny_model("llama", tmp_path / "target")
    draft = save_tiny_model(
        "llama", tmp_path / "draft", max_position_embeddings=24, num_hidden_layers=2
    )
    config = {"target": str(target), "max_model_len": 64}
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    outputs = []
    for extra in ({}, {"speculative": speculative}):
        with Engine.from_config(EngineConfig.parse({**config, **extra})) as engine:
            outputs.append(engine.generate(["0123456789"], params))
    assert outputs[0][0].token_ids == outputs[1][0].token_ids
    # Positions 10 to 23 can be read by the drafter: no round begins with drafts behind them.
    assert 0 < outputs[1].stats.num_drafts <= 14
