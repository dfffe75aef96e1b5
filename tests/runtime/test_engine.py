"""The embedded engine: speculation, ranks and memory pressure change no token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specreg.config import EngineConfig
from specreg.errors import AdmissionError, ConfigError, PolicyError
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.sampling_params import SamplingParams

K = 3
PROMPTS = ["hello world", "a", "The quick brown fox jumps over the lazy dog", "(1, 2, 3)", "x = y"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def sampled(seed: int = 0, temperature: float = 0.8, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True, **options
    )


Run = Callable[..., GenerateOutputs]


@pytest.fixture
def run(tiny_target: Path, tiny_draft: Path) -> Run:
    """Generate for `PROMPTS`; keyword arguments are config keys."""

    def run(
        params: SamplingParams | list[SamplingParams] = GREEDY,
        *,
        drafts: str | None = None,
        prompts: list[Any] = PROMPTS,
        **config: Any,
    ) -> GenerateOutputs:
        if drafts is not None:
            config["speculative"] = {
                "method": "draft_model",
                "model": str(tiny_draft),
                "num_speculative_tokens": K,
                "draft_sample_method": drafts,
            }
        config = {
            "target": str(tiny_target),
            "max_model_len": 96,
            "memory_budget_gib": 0.1,
            **config,
        }
        with Engine.from_config(EngineConfig.parse(config)) as engine:
            return engine.generate(prompts, params)

    return run


def tokens(outputs: GenerateOutputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def baseline(tiny_target: Path) -> list[list[int]]:
    """What transformers itself generates greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_target)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_target)
    generated = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        generated.append(output[0, ids.shape[1] :].tolist())
    return generated


def test_greedy_decoding_equals_what_transformers_generates(
    run: Run, baseline: list[list[int]]
) -> None:
    assert tokens(run()) == baseline


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_greedy_decoding_with_drafts_equals_decoding_without(
    run: Run, baseline: list[list[int]], drafts: str
) -> None:
    outputs = run(drafts=drafts)
    assert tokens(outputs) == baseline
    stats = outputs.stats
    assert 1.2 < stats.acceptance_length < K + 1
    assert stats.num_accepted_tokens == sum(stats.num_accepted_by_position)
    assert stats.acceptance_per_position == sorted(stats.acceptance_per_position, reverse=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_batch_sharded", [False, True])
def test_greedy_decoding_on_several_ranks_equals_decoding_on_one(
    run: Run, baseline: list[list[int]], num_ranks: int, is_batch_sharded: bool
) -> None:
    outputs = run(
        drafts="probabilistic",
        tensor_parallel_size=num_ranks,
        enable_batch_sharded_sampling=is_batch_sharded,
        max_num_seqs=4,
    )
    assert tokens(outputs) == baseline


def test_sharding_the_cache_changes_no_sampled_token_and_keeps_a_share_of_its_bytes(
    run: Run,
) -> None:
    params = [sampled(seed, temperature) for seed, temperature in enumerate([0.8, 1, 0, 0.5, 1.3])]
    arms = {
        sharding: run(
            params,
            drafts="probabilistic",
            tensor_parallel_size=2,
            enable_batch_sharded_sampling=True,
            draft_logits_sharding=sharding,
            max_num_seqs=4,
        )
        for sharding in ("off", "auto")
    }
    assert tokens(arms["auto"]) == tokens(arms["off"])
    off, auto = arms["off"].stats, arms["auto"].stats
    assert auto.num_accepted_by_position == off.num_accepted_by_position
    assert auto.draft_logits_bytes_per_rank * 2 == off.draft_logits_bytes_per_rank
    assert off.acceptance_length > 1.2
    assert auto.num_collectives == off.num_collectives
    assert auto.num_collective_bytes == off.num_collective_bytes
    assert off.num_collective_bytes.keys() == off.num_collectives.keys()
    assert auto.num_steps == off.num_steps


def test_what_sharding_frees_becomes_kv_blocks(run: Run) -> None:
    blocks = {
        sharding: run(
            drafts="probabilistic",
            prompts=["a"],
            tensor_parallel_size=2,
            enable_batch_sharded_sampling=True,
            draft_logits_sharding=sharding,
            max_num_seqs=64,
        ).stats
        for sharding in ("off", "auto")
    }
    freed = blocks["off"].draft_logits_bytes_per_rank - blocks["auto"].draft_logits_bytes_per_rank
    block_bytes = 2 * 16 * (2 * 8) * 4 * (4 + 4)  # keys and values of 4 target and 4 draft layers
    gained = blocks["auto"].num_kv_blocks - blocks["off"].num_kv_blocks
    assert freed // block_bytes <= gained <= freed // block_bytes + 1
    assert gained > 0


def test_a_full_pool_preempts_and_recomputes_without_changing_a_token(
    run: Run, baseline: list[list[int]]
) -> None:
    outputs = run(drafts="probabilistic", num_kv_blocks=12, block_size=8, max_num_batched_tokens=24)
    assert outputs.stats.num_preemptions > 0
    assert tokens(outputs) == baseline


def test_chunked_prefill_equals_unchunked(run: Run, baseline: list[list[int]]) -> None:
    assert tokens(run(drafts="probabilistic", max_num_batched_tokens=7)) == baseline


def test_a_seed_decides_a_request_whatever_shares_its_batch(run: Run) -> None:
    alone = run(sampled(seed=42), prompts=["hello world"], drafts="probabilistic")
    params = [sampled(seed=7), sampled(seed=42, temperature=0.8), SamplingParams(max_tokens=9)]
    batched = run(params, prompts=["abc", "hello world", "zz"], drafts="probabilistic")
    assert batched[1].token_ids == alone[0].token_ids


def test_two_seeds_differ_and_one_seed_repeats(run: Run) -> None:
    outputs = run(
        [sampled(1), sampled(1), sampled(2)], prompts=["same"] * 3, drafts="probabilistic"
    )
    first, again, other = tokens(outputs)
    assert first == again != other


def test_cut_offs_of_one_token_make_every_temperature_greedy(
    run: Run, baseline: list[list[int]]
) -> None:
    params = [
        sampled(top_k=1),
        sampled(top_p=1e-6),
        sampled(min_p=1.0),
        sampled(temperature=1e-6),
        sampled(top_k=1, temperature=3.0),
    ]
    assert tokens(run(params, drafts="probabilistic")) == baseline


def test_a_stop_string_ends_the_output_before_it(run: Run, baseline: list[list[int]]) -> None:
    full = run(prompts=["hello world"])[0].text
    stop = full[5:7]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=(stop,))
    (output,) = run(params, prompts=["hello world"], drafts="greedy")
    assert output.finish_reason == "stop"
    assert output.text == full[: full.index(stop)]
    assert output.token_ids == baseline[0][: len(output.token_ids)]


def test_a_stop_token_ends_the_output_with_it(run: Run, baseline: list[list[int]]) -> None:
    stop = baseline[0][4]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    (output,) = run(params, prompts=["hello world"], drafts="greedy")
    assert output.finish_reason == "stop"
    assert output.token_ids == baseline[0][: baseline[0].index(stop) + 1]


def test_max_tokens_and_the_model_length_end_a_request(run: Run) -> None:
    short = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    long = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    outputs = run([short, long], prompts=["ab", "ab"], drafts="greedy", max_model_len=32)
    assert [len(output.token_ids) for output in outputs] == [1, 30]
    assert [output.finish_reason for output in outputs] == ["length", "length"]


def test_an_engine_serves_one_call_after_another(tiny_target: Path, tiny_draft: Path) -> None:
    config = EngineConfig.parse(
        {
            "target": str(tiny_target),
            "max_model_len": 96,
            "memory_budget_gib": 0.1,
            "tensor_parallel_size": 2,
            "enable_batch_sharded_sampling": True,
            "speculative": {
                "method": "draft_model",
                "model": str(tiny_draft),
                "num_speculative_tokens": K,
                "draft_sample_method": "probabilistic",
            },
        }
    )
    with Engine.from_config(config) as engine:
        first = engine.generate(PROMPTS, sampled(3))
        second = engine.generate(PROMPTS[::-1], sampled(3))
    assert tokens(second)[::-1] == tokens(first)
    with pytest.raises(ConfigError, match="was closed"):
        engine.generate(["late"])


def test_each_rank_says_at_start_what_its_cache_takes_and_why(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specreg"):
        run(drafts="probabilistic", prompts=["a"])
    (line,) = [r.getMessage() for r in caplog.records if "draft-logits cache" in r.getMessage()]
    assert "rank 0: draft-logits cache of 8 rows, layout dense" in line
    assert "not sharded: batch-sharded-sampling" in line


def test_the_lines_of_the_other_ranks_are_seen_too(
    run: Run, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "specreg"):
        run(
            drafts="probabilistic",
            prompts=["a"],
            tensor_parallel_size=2,
            enable_batch_sharded_sampling=True,
        )
    assert "rank 0: draft-logits cache of 4 rows" in caplog.text
    assert "rank 1: draft-logits cache of 4 rows" in capfd.readouterr().err


def test_require_without_a_speculator_is_refused(run: Run) -> None:
    with pytest.raises(PolicyError, match="nothing drafts"):
        run(draft_logits_sharding="require")


def test_require_refuses_a_run_that_cannot_shard(run: Run) -> None:
    with pytest.raises(PolicyError, match="batch-sharded-sampling"):
        run(drafts="probabilistic", draft_logits_sharding="require")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "0 token ids"), ([5] * 96, "96 token ids"), ([5, 1000], "each of 0..100")],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    run: Run, prompt: list[int], message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        run(prompts=["fine", prompt])


def test_sampling_parameters_that_do_not_match_the_prompts_are_refused(run: Run) -> None:
    with pytest.raises(AdmissionError, match="1 for 5 prompts"):
        run([GREEDY])


def test_a_pool_too_small_for_one_request_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="cannot hold one request"):
        run(num_kv_blocks=5, block_size=16)


@pytest.mark.parametrize("sizes", [[8], [2, 3]])
def test_padded_batches_emit_what_unpadded_ones_do(
    run: Run, baseline: list[list[int]], sizes: list[int]
) -> None:
    assert tokens(run(drafts="probabilistic", cuda_graph_sizes=sizes)) == baseline
    params = [sampled(seed, temperature) for seed, temperature in enumerate([0.8, 1, 0, 0.5, 1.3])]
    padded = run(params, drafts="probabilistic", cuda_graph_sizes=sizes)
    assert tokens(padded) == tokens(run(params, drafts="probabilistic"))


def test_padded_batches_on_several_ranks_emit_what_unpadded_ones_do(
    run: Run, baseline: list[list[int]]
) -> None:
    ranks = {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True, "max_num_seqs": 4}
    padded = {**ranks, "drafts": "probabilistic", "cuda_graph_sizes": [4]}
    assert tokens(run(**padded)) == baseline
    params = [sampled(seed, temperature) for seed, temperature in enumerate([0.8, 1, 0, 0.5, 1.3])]
    arms = [run(params, **padded, draft_logits_sharding=s) for s in ("off", "auto")]
    assert tokens(arms[0]) == tokens(arms[1])
    assert arms[0].stats.num_collective_bytes == arms[1].stats.num_collective_bytes
    assert tokens(arms[0]) == tokens(run(params, **ranks, drafts="probabilistic"))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", "the prompts are no list"),
        ([5, 6, 7], "neither text nor token ids"),
        ([[5.0, 6.5]], "neither text nor token ids"),
        ([None], "neither text nor token ids"),
    ],
)
def test_what_is_no_prompt_is_refused_before_anything_runs(
    run: Run, prompts: Any, message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        run(prompts=prompts)


def test_token_ids_of_any_integer_type_are_prompts(run: Run) -> None:
    ids = torch.tensor([5, 6, 7])
    outputs = run(prompts=[ids.tolist(), ids.numpy()])
    assert outputs[0].token_ids == outputs[1].token_ids


def test_an_empty_list_of_parameters_does_not_stand_for_the_default(run: Run) -> None:
    with pytest.raises(AdmissionError, match="0 for 5 prompts"):
        run([])


def test_requests_longer_than_the_targets_positions_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="1000; allowed: at most 256"):
        run(max_model_len=1000)


def test_a_pool_takes_no_memory_before_requests_write_it(tiny_target: Path) -> None:
    config = {"target": str(tiny_target), "max_model_len": 96, "memory_budget_gib": 1.0}

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    before = resident_bytes()
    with Engine.from_config(EngineConfig.parse(config)) as engine:
        assert engine.models.kv_pool.nbytes > 0.9 * 2**30
        assert resident_bytes() - before < 2**29
