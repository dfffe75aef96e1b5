"""A draft watermarker in a run: the mark in what is emitted, the plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_plugins import ToyPlugin, capabilities, spec

from specreg.config import EngineConfig
from specreg.errors import ConfigError, PluginError
from specreg.plugin import DraftWatermarkerFactory
from specreg.policy import resolve
from specreg.registry import Registry
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.runtime.watermarking import make_watermarker
from specreg.sampling_params import SamplingParams
from specreg.watermark import KEY_VARIABLE, KeyedGumbel, keyed_gumbel


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a secret")


def run(target: Path, draft: Path, **config: Any) -> tuple[GenerateOutputs, Any]:
    """48 tokens for each of six prompts."""
    keys = {
        "target": str(target),
        "max_model_len": 96,
        "memory_budget_gib": 0.1,
        "speculative": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        },
        **config,
    }
    prompts = [f"prompt number {number}" for number in range(6)]
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=3, ignore_eos=True)
    with Engine.from_config(EngineConfig.parse(keys)) as engine:
        return engine.generate(prompts, params), engine.plan


def scores(outputs: GenerateOutputs, watermarker: KeyedGumbel) -> list[float]:
    return [watermarker.score(torch.tensor(output.token_ids)).z for output in outputs]


def test_accepted_drafts_carry_the_mark_and_a_run_without_it_does_not(
    tiny_target: Path, tiny_draft: Path
) -> None:
    marked, plan = run(tiny_target, tiny_draft, draft_watermarker="keyed-gumbel")
    plain, _ = run(tiny_target, tiny_draft)
    watermarker = keyed_gumbel(None)  # type: ignore[arg-type]
    assert min(scores(marked, watermarker)) > 5
    assert max(scores(plain, watermarker)) < 4
    assert max(scores(marked, KeyedGumbel(1))) < 4
    assert plan.num_shards == 1
    # The mark costs nothing of acceptance.
    assert marked.stats.acceptance_length > plain.stats.acceptance_length - 0.5


def test_two_ranks_mark_alike_and_the_unmasked_form_keeps_a_replicated_cache(
    tiny_target: Path, tiny_draft: Path
) -> None:
    ranks = {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True}
    outputs = {}
    for name in ("keyed-gumbel", "keyed-gumbel-unmasked"):
        outputs[name], plan = run(tiny_target, tiny_draft, draft_watermarker=name, **ranks)
        assert plan.num_shards == (2 if name == "keyed-gumbel" else 1)
        verdict = {verdict.rule: verdict.passed for verdict in plan.verdicts}
        assert verdict["no-draft-watermarker"] is (name == "keyed-gumbel")
    masked, unmasked = outputs.values()
    assert [o.token_ids for o in masked] == [o.token_ids for o in unmasked]
    assert min(scores(masked, keyed_gumbel(None))) > 5  # type: ignore[arg-type]


# Loading


def inputs_for(supports: bool = True, sampling: str = "probabilistic", **factory: Any) -> Any:
    declared = {"factory": "specreg.watermark:keyed_gumbel", "honors_owner_mask": True} | factory
    plugin = ToyPlugin(
        spec(capabilities=replace(capabilities(), supports_watermarker=supports)),
        draft_watermarkers=[DraftWatermarkerFactory(name="mark", **declared)],
    )
    config = EngineConfig.parse(
        {
            "speculative": {
                "method": "toy",
                "num_speculative_tokens": 2,
                "draft_sample_method": sampling,
            },
            "draft_watermarker": "mark",
            "vocab_size": 100,
            "dtype": "float32",
        }
    )
    return resolve(config, Registry.from_plugins([plugin])).inputs


def make(inputs: Any) -> Any:
    return make_watermarker(inputs, 100, torch.device("cpu"))


def test_a_watermarker_is_made_when_it_is_configured() -> None:
    inputs = inputs_for()
    assert isinstance(make(inputs), KeyedGumbel)
    assert make(replace(inputs, watermarker=None)) is None


def test_a_speculator_that_does_not_declare_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'toy'[^$]*supports_watermarker[^$]*step by step"):
        make(inputs_for(supports=False))


def test_greedy_drafts_cannot_be_marked() -> None:
    with pytest.raises(ConfigError, match="argmaxes cannot be marked"):
        make(inputs_for(sampling="greedy"))


def honest(context: Any) -> Any:
    return SimpleNamespace(honors_owner_mask=False, context_size=2, sample=print)


def nothing(context: Any) -> Any:
    return SimpleNamespace(honors_owner_mask=False)


@pytest.mark.parametrize(
    ("factory", "declared"), [("honest", True), ("nothing", False)], ids=["liar", "nothing"]
)
def test_a_factory_that_gives_another_thing_than_it_declares_is_refused(
    factory: str, declared: bool
) -> None:
    inputs = inputs_for(factory=f"{__name__}:{factory}", honors_owner_mask=declared)
    with pytest.raises(PluginError, match=rf"honors_owner_mask=False; allowed[^$]*{declared}"):
        make(inputs)
    assert make(inputs_for(factory=f"{__name__}:honest", honors_owner_mask=False)) is not None
