"""The plugin `ngram`: what it finds, what it declares, and that it changes no law."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from specreg_ngram.lookup import look_up
from specreg_ngram.options import NgramOptions
from torch import Tensor

from specreg.config import EngineConfig
from specreg.errors import ConfigError, PolicyError
from specreg.policy import resolve
from specreg.registry import get_registry
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.sampling_params import SamplingParams
from specreg.testing.tiny_models import save_tiny_model


def padded(rows: list[list[int]], width: int = 0) -> Tensor:
    width = max([width, *map(len, rows)])
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def by_the_book(tokens: list[int], low: int, high: int, num_drafts: int) -> list[int]:
    """Longest lengths first, then the first place, as loops."""
    for length in range(min(high, len(tokens)), low - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == suffix:
                found = tokens[start + length : start + length + num_drafts]
                return found + [-1] * (num_drafts - len(found))
    return [-1] * num_drafts


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    num_drafts=st.integers(1, 6),
    padding=st.integers(0, 3),
)
def test_the_look_up_finds_what_loops_find(
    rows: list[list[int]], lengths: list[int], num_drafts: int, padding: int
) -> None:
    low, high = lengths
    history = padded(rows, max(map(len, rows)) + padding)
    drafts = look_up(history, low, high, num_drafts)
    assert drafts.tolist() == [by_the_book(row, low, high, num_drafts) for row in rows]


def test_the_longest_match_is_preferred_and_then_the_first() -> None:
    tokens = [9, 1, 2, 5, 7, 1, 2, 6, 3, 1, 2, 8, 7, 1, 2]
    assert look_up(padded([tokens]), 1, 2, 2).tolist() == [[5, 7]]
    assert look_up(padded([tokens]), 1, 3, 2).tolist() == [[6, 3]]
    assert look_up(padded([tokens]), 4, 5, 2).tolist() == [[-1, -1]]


def test_a_request_without_tokens_finds_nothing() -> None:
    assert look_up(torch.full((1, 3), -1), 1, 2, 2).tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("given", "lengths"),
    [({}, (5, 5)), ({"min": 2}, (2, 2)), ({"max": 3}, (3, 3)), ({"min": 2, "max": 4}, (2, 4))],
)
def test_an_option_that_is_not_given_is_the_other(
    given: dict[str, int], lengths: tuple[int, int]
) -> None:
    options = {f"prompt_lookup_{name}": value for name, value in given.items()}
    assert NgramOptions(**options).lengths == lengths


def config_of(target: str = "", **speculative: Any) -> dict[str, Any]:
    return {
        "target": target,
        "speculative": {"method": "ngram", "num_speculative_tokens": 3, **speculative},
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "min 4 is above prompt_lookup_max 3"),
        ({"prompt_lookup_min": 0}, "greater than or equal to 1"),
        ({"prompt_lookup_max": "3"}, "valid integer"),
        ({"prompt_lookup_mix": 3}, "has no option 'prompt_lookup_mix'"),
    ],
)
def test_options_out_of_order_or_range_are_refused(options: dict[str, Any], message: str) -> None:
    speculative = EngineConfig.parse(config_of(**options)).speculative
    assert speculative is not None
    with pytest.raises(ConfigError) as error:
        get_registry().select(speculative)
    assert message in str(error.value)


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_there_is_no_cache_and_the_plan_says_why(sampling: str) -> None:
    sharded = {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True}
    config = config_of(draft_sample_method=sampling) | sharded
    plan = resolve(EngineConfig.parse(config))
    assert (plan.has_cache, plan.bytes_per_rank, plan.num_shards) == (False, 0, 1)
    failed = [verdict for verdict in plan.verdicts if verdict.passed is False]
    assert [verdict.rule for verdict in failed] == ["probabilistic-drafts"]
    reason = {
        "greedy": "draft_sample_method is greedy",
        "probabilistic": "speculator ngram cannot draft probabilistically",
    }
    assert reason[sampling] in failed[0].reason
    with pytest.raises(PolicyError, match="probabilistic-drafts") as error:
        resolve(EngineConfig.parse(config | {"draft_logits_sharding": "require"}))
    assert reason[sampling] in error.value.got


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("target"), seed=0))


def generate(
    target: str, prompts: list[Any], params: Any, drafts: bool = True, **extra: Any
) -> GenerateOutputs:
    config: dict[str, Any] = {"target": target, "max_model_len": 128, "memory_budget_gib": 0.1}
    if drafts:
        options = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        config |= config_of(target, draft_sample_method="probabilistic", **options)
    with Engine.from_config(EngineConfig.parse(config | extra)) as engine:
        return engine.generate(prompts, params)


PROMPTS = ["abcabcabcabc", "no repetition", "xyxyxyxyxyxyxy", "a", "(1, 2), (1, 2), (1,"]


def test_greedy_runs_on_one_rank_and_two_equal_those_without_drafts(target: str) -> None:
    """A random model that may only say two things soon repeats itself."""
    words = (40, 41)
    params = SamplingParams(
        max_tokens=60, temperature=0.0, ignore_eos=True, allowed_token_ids=words
    )
    expected = generate(target, PROMPTS, params, drafts=False, max_num_seqs=3)
    for num_ranks in (1, 2):
        outputs = generate(
            target,
            PROMPTS,
            params,
            max_num_seqs=3,
            max_num_batched_tokens=9,  # prompts come in chunks
            tensor_parallel_size=num_ranks,
            enable_batch_sharded_sampling=True,
        )
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert outputs.stats.acceptance_length > 2
        assert outputs.stats.draft_logits_bytes_per_rank == 0


def test_no_draft_lies_beyond_the_longest_request_that_is_drafted_for(target: str) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    speculative = {
        **config_of()["speculative"],
        "prompt_lookup_max": 1,
        "max_model_len": 20,
    }
    outputs = generate(target, ["xyxyxyxyxyxyxy"], params, drafts=False, speculative=speculative)
    assert 0 < outputs.stats.num_draft_tokens < 20
    assert len(outputs[0].token_ids) == 60


def test_a_draft_checkpoint_is_refused(target: str) -> None:
    config = config_of(target, model=target)
    with pytest.raises(ConfigError, match="prompt look-up has no draft checkpoint"):
        Engine.from_config(EngineConfig.parse(config))


TINY_VOCAB_SIZE = 5
PROMPT = [3, 4, 1, 3, 4, 2, 3, 4, 1, 3]
NUM_REQUESTS = 3000
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def tiny_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    return str(save_tiny_model("llama", directory, seed=4, vocab_size=TINY_VOCAB_SIZE))


def conditionals(target: str, temperature: float) -> Tensor:
    """The target's law of the token behind each sequence of `NUM_TOKENS - 1` tokens and fewer."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    sequences = itertools.product(range(TINY_VOCAB_SIZE), repeat=NUM_TOKENS - 1)
    batch = torch.tensor([[*PROMPT, *tail] for tail in sequences])
    with torch.inference_mode():
        logits = auto.from_pretrained(target)(batch).logits
    law: Tensor = (logits[:, len(PROMPT) - 1 :].double() / temperature).softmax(-1)
    return law.view(*[TINY_VOCAB_SIZE] * (NUM_TOKENS - 1), NUM_TOKENS, TINY_VOCAB_SIZE)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sampled_tokens_follow_the_target_whatever_was_looked_up(
    tiny_vocabulary: str, temperature: float
) -> None:
    """Joint law of three tokens in 3000 requests, a chi-square of 125 cells (pooled below 5
    expected); p > 1e-3, about 3.3 sigma.

    A residual that keeps the rejected draft, simulated by its law of the second token, scores
    p < 1e-20.
    """
    params = [
        SamplingParams(max_tokens=NUM_TOKENS + 2, temperature=temperature, seed=s, ignore_eos=True)
        for s in range(NUM_REQUESTS)
    ]
    outputs = generate(
        tiny_vocabulary,
        [PROMPT] * NUM_REQUESTS,
        params,
        max_num_seqs=250,
        max_num_batched_tokens=4096,
    )
    assert 0.1 < outputs.stats.num_accepted_tokens / outputs.stats.num_draft_tokens < 0.9
    tokens = torch.tensor([output.token_ids[:NUM_TOKENS] for output in outputs])
    law = conditionals(tiny_vocabulary, temperature)
    first, second, third = law[0, 0, 0], law[:, 0, 1], law[:, :, 2]
    joint = first[:, None, None] * second[:, :, None] * third
    assert pvalue(tokens, joint) > 1e-3

    wrong = second.clone()
    for token in range(TINY_VOCAB_SIZE):
        draft = by_the_book([*PROMPT, token], 1, 3, 1)[0]
        if draft >= 0:
            wrong[token] = second[token] * (1 - second[token, draft])
            wrong[token, draft] += second[token, draft]
    assert pvalue(tokens[:, :2], first[:, None] * second) > 1e-3
    assert pvalue(tokens[:, :2], first[:, None] * wrong) < 1e-20


def pvalue(tokens: Tensor, law: Tensor) -> float:
    """Of a chi-square test of the rows of `tokens` against `law`, an axis a column."""
    place = torch.tensor([0] * len(tokens))
    for column in tokens.T:
        place = place * TINY_VOCAB_SIZE + column
    counts = torch.bincount(place, minlength=law.numel()).double()
    expected = law.flatten() * len(tokens)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    keep = expected > 0
    return float(stats.chisquare(counts[keep], expected[keep]).pvalue)
