"""NaN from the target: the request that meets it ends, all others do not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specreg.config import EngineConfig
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.sampling_params import SamplingParams
from specreg.testing.tiny_models import save_tiny_model

POISON = 98  # a token whose embedding is NaN: every position behind it has NaN logits
PROMPTS: list[Any] = ["hello world", [5, 6, POISON, 7, 8], "a", [POISON], "x = y", "(1, 2, 3)"]


@pytest.fixture(scope="module")
def poisoned_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("poisoned"), seed=0)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def run(target: Path, draft: Path, params: list[SamplingParams], **extra: Any) -> GenerateOutputs:
    config = {
        "target": str(target),
        "max_model_len": 96,
        "max_num_seqs": 2,
        "num_kv_blocks": 24,
        "block_size": 4,
        "speculative": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        },
        **extra,
    }
    with Engine.from_config(EngineConfig.parse(config)) as engine:
        return engine.generate(PROMPTS, params)


PARAMS = [
    SamplingParams(
        max_tokens=24,
        temperature=temperature,
        seed=seed,
        ignore_eos=True,
        logit_bias={POISON: -100.0},
        logprobs=2,
    )
    for seed, temperature in enumerate([0.8, 1.0, 0.0, 0.9, 1.2, 0.7])
]


@pytest.fixture(scope="module")
def clean(tiny_target: Path, tiny_draft: Path) -> GenerateOutputs:
    return run(tiny_target, tiny_draft, PARAMS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_request_ends_in_error_and_later_ones_reuse_its_slot_and_blocks_unharmed(
    poisoned_target: Path, tiny_draft: Path, clean: GenerateOutputs, num_ranks: int
) -> None:
    """Few blocks, so that those with NaN keys and values are handed out again."""
    ranks = {"tensor_parallel_size": num_ranks, "enable_batch_sharded_sampling": True}
    outputs = run(poisoned_target, tiny_draft, PARAMS, **ranks)
    is_poisoned = [POISON in output.prompt_token_ids for output in outputs]
    assert is_poisoned.count(True) == 2
    for output, expected, poisoned in zip(outputs, clean, is_poisoned, strict=True):
        if poisoned:
            assert (output.finish_reason, output.token_ids) == ("error", [])
            assert output.logprobs == []
        else:
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == "length"
    assert (clean.stats.num_nans, outputs.stats.num_nans) == (0, 2)
    assert outputs.stats.num_draft_nans == 0


def test_nan_from_the_drafter_is_counted_and_only_costs_acceptance(
    poisoned_target: Path, tiny_target: Path
) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0, ignore_eos=True) for _ in PROMPTS]
    outputs = run(tiny_target, poisoned_target, params)
    expected = run(tiny_target, tiny_target, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert (outputs.stats.num_nans, expected.stats.num_draft_nans) == (0, 0)
    assert outputs.stats.num_draft_nans > 0


def test_what_a_grammar_forbids_altogether_ends_in_error_behind_what_it_allowed(
    tiny_target: Path, tiny_draft: Path
) -> None:
    class TwoTokens:
        def bitmask(self, output_token_ids: Any) -> bytes:
            return b"" if len(output_token_ids) == 2 else b"\xff" * 16

    params = [SamplingParams(max_tokens=9, seed=3, ignore_eos=True) for _ in PROMPTS]
    params[0] = SamplingParams(max_tokens=9, seed=3, ignore_eos=True, grammar=TwoTokens())
    outputs = run(tiny_target, tiny_draft, params)
    assert (outputs[0].finish_reason, len(outputs[0].token_ids)) == ("error", 2)
    assert {len(output.token_ids) for output in outputs[1:]} == {9}
