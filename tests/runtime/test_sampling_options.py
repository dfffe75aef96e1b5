"""What requests ask of their logits, through the whole engine, against transformers' own logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specreg.config import EngineConfig
from specreg.errors import AdmissionError
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.sampling_params import SamplingParams
from specreg.testing.tiny_models import TINY_VOCAB_SIZE as V

NUM_TOKENS = 20
Setup = tuple[str, SamplingParams]


class EveryThird:
    """After token t only tokens congruent to t + 1 modulo 3; one word short of the vocabulary."""

    def bitmask(self, output_token_ids: Sequence[int]) -> bytes:
        wanted = (output_token_ids[-1] + 1) % 3 if output_token_ids else 0
        bits = sum(1 << token for token in range(0, 96) if token % 3 == wanted)
        return bits.to_bytes(12, "little")


def asking(seed: int, temperature: float, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True, **options
    )


# One candidate is left at temperatures above 0, so that the sampling path is taken and a reference
# can follow it. Every request differs from its neighbours in everything.
DECIDED: list[Setup] = [
    ("hello world", asking(1, 0.7, top_k=1, repetition_penalty=1.4)),
    ("a", asking(2, 1.3, top_k=1, presence_penalty=2.0, frequency_penalty=0.5)),
    ("The quick brown fox", asking(3, 0.9, top_k=1, logit_bias={40: 3.0, 41: -100.0, 7: 2.0})),
    ("(1, 2, 3)", asking(4, 1.1, top_k=1, allowed_token_ids=tuple(range(30, V, 2)))),
    ("x = y", asking(5, 0.5, top_k=1, grammar=EveryThird())),
    (
        "all of it",
        asking(
            6,
            0.8,
            top_k=1,
            frequency_penalty=-0.5,
            repetition_penalty=0.8,
            logit_bias={50: 4.0},
            allowed_token_ids=tuple(range(10, 90)),
            grammar=EveryThird(),
        ),
    ),
    ("greedy", asking(7, 0.0, repetition_penalty=2.0, presence_penalty=-1.0)),
]
DRAWN: list[Setup] = [
    ("draw", asking(8, 1.0, logprobs=5)),
    ("none", asking(9, 0.6)),
    ("these", asking(10, 1.4, top_p=0.9, logprob_token_ids=(100, 7, V - 1))),
    ("both", asking(11, 0.9, logprobs=0, logprob_token_ids=(3,), logit_bias={5: 2.0})),
]


def config_of(target: Path, draft: Path | None, num_ranks: int, **extra: Any) -> EngineConfig:
    config: dict[str, Any] = {
        "target": str(target),
        "max_model_len": 96,
        "memory_budget_gib": 0.1,
        "max_num_seqs": 5,
        "tensor_parallel_size": num_ranks,
        "enable_batch_sharded_sampling": True,
        **extra,
    }
    if draft is not None:
        config["speculative"] = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        }
    return EngineConfig.parse(config)


@pytest.fixture(scope="module", params=[1, 2])
def outputs(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> GenerateOutputs:
    prompts, params = zip(*DECIDED, *DRAWN, strict=True)
    with Engine.from_config(config_of(tiny_target, tiny_draft, request.param)) as engine:
        return engine.generate(prompts, list(params))


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(tiny_target).eval()


def raw_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def changed(row: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """What the documentation of `SamplingParams` says, one token at a time."""
    row = row.clone()
    mask = params.grammar.bitmask(output) if params.grammar else bytes([255] * V)
    for token in range(V):
        count = output.count(token)
        is_allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        is_allowed &= token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)
        value = float(row[token]) + params.logit_bias.get(token, 0.0)
        if count or token in prompt:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        row[token] = value if is_allowed else -torch.inf
    return row


def test_requests_with_one_candidate_decode_what_a_reference_decodes(
    outputs: GenerateOutputs, model: Any
) -> None:
    for output, (_, params) in zip(outputs, DECIDED, strict=False):
        prompt, expected = output.prompt_token_ids, list[int]()
        changes_something = False
        for _ in range(NUM_TOKENS):
            row = raw_logits(model, prompt + expected)[-1]
            best = int(changed(row, prompt, expected, params).argmax())
            changes_something |= best != int(row.argmax())
            expected.append(best)
        assert output.token_ids == expected, output.prompt
        assert changes_something, output.prompt
    assert outputs.stats.acceptance_length > 1.1


def test_each_position_has_the_log_probabilities_of_the_whole_raw_distribution(
    outputs: GenerateOutputs, model: Any
) -> None:
    for output, (_, params) in zip(outputs[len(DECIDED) :], DRAWN, strict=True):
        if not params.wants_logprobs:
            assert output.logprobs is None
            continue
        assert output.logprobs is not None
        tokens = output.prompt_token_ids + output.token_ids
        expected = raw_logits(model, tokens)[len(output.prompt_token_ids) - 1 : -1].log_softmax(1)
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        for row, entry in zip(expected, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert len(entry.top) == (params.logprobs or 0)
            values = [value for _, value in entry.top]
            assert values == pytest.approx(row.topk(len(entry.top)).values.tolist(), abs=1e-4)
            assert tuple(token for token, _ in entry.asked) == params.logprob_token_ids
            for token, value in entry.top + entry.asked:
                assert value == pytest.approx(float(row[token]), abs=1e-4)
    assert all(output.logprobs is None for output in outputs[: len(DECIDED)])


def test_without_a_speculator_the_same_requests_decode_the_same(
    outputs: GenerateOutputs, tiny_target: Path
) -> None:
    prompts, params = zip(*DECIDED, strict=True)
    with Engine.from_config(config_of(tiny_target, None, 1)) as engine:
        alone = engine.generate(prompts, list(params))
    expected = [output.token_ids for output in outputs[: len(DECIDED)]]
    assert [output.token_ids for output in alone] == expected


def test_nobody_asking_or_somebody_makes_the_same_collectives(
    tiny_target: Path, tiny_draft: Path
) -> None:
    prompts = ["one owner only"]  # slot 0: rank 1 owns nothing
    with Engine.from_config(config_of(tiny_target, tiny_draft, 2)) as engine:
        plain = engine.generate(prompts, asking(1, 0.8))
        asked = engine.generate(prompts, asking(1, 0.8, logprobs=3, logprob_token_ids=(1,)))
    assert asked[0].token_ids == plain[0].token_ids
    assert asked[0].logprobs is not None
    assert asked.stats.num_collectives == plain.stats.num_collectives
    assert asked.stats.num_steps == plain.stats.num_steps


def test_penalties_survive_preemption(tiny_target: Path, tiny_draft: Path) -> None:
    setups = [DECIDED[0], DECIDED[1], DECIDED[5], DECIDED[6]]
    prompts, params = zip(*setups, strict=True)
    results = []
    for pool in ({}, {"num_kv_blocks": 12, "block_size": 8}):
        config = config_of(tiny_target, tiny_draft, 1, **pool)
        with Engine.from_config(config) as engine:
            results.append(engine.generate(prompts, list(params)))
    ample, tight = results
    assert ample.stats.num_preemptions == 0 < tight.stats.num_preemptions
    assert [o.token_ids for o in tight] == [o.token_ids for o in ample]


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {V: 1.0}}, {"allowed_token_ids": (V,)}, {"logprob_token_ids": (V + 5,)}],
)
def test_ids_beyond_the_vocabulary_are_refused_at_admission(
    tiny_target: Path, options: dict[str, Any]
) -> None:
    with (
        Engine.from_config(config_of(tiny_target, None, 1)) as engine,
        pytest.raises(AdmissionError, match="out of range"),
    ):
        engine.generate(["fine", "not"], [SamplingParams(), SamplingParams(**options)])
