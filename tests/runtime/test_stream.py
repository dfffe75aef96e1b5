"""Outputs as they come, and requests that are cancelled on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specreg.config import EngineConfig
from specreg.errors import AdmissionError, ConfigError
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams

PROMPTS = ["hello world", "a", "The quick brown fox"]
MAX_NUM_SEQS = 2


def sampled(seed: int, max_tokens: int = 16, **options: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.8, seed=seed, ignore_eos=True, **options
    )


def make_engine(target: Path, draft: Path, num_ranks: int) -> Engine:
    return Engine.from_config(
        EngineConfig.parse(
            {
                "target": str(target),
                "max_model_len": 96,
                "memory_budget_gib": 0.1,
                "max_num_seqs": MAX_NUM_SEQS,
                "tensor_parallel_size": num_ranks,
                "enable_batch_sharded_sampling": True,
                "speculative": {
                    "method": "draft_model",
                    "model": str(draft),
                    "num_speculative_tokens": 3,
                    "draft_sample_method": "probabilistic",
                },
            }
        )
    )


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, tiny_target: Path, tiny_draft: Path) -> Iterator[Engine]:
    with make_engine(tiny_target, tiny_draft, request.param) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _everything_is_free_again(engine: Engine) -> Iterator[None]:
    """Whatever a test does, slots, blocks and cache rows come back, and the engine goes on."""
    yield
    assert engine.num_free_slots == MAX_NUM_SEQS
    assert engine.num_free_kv_blocks == engine.models.num_kv_blocks
    drafting = engine.models.drafting
    assert drafting is not None
    assert drafting.draft_logits is not None
    assert int(drafting.draft_logits.view().state.sum()) == 0


def test_deltas_in_order_of_emission_add_up_to_the_outputs(engine: Engine) -> None:
    params = [sampled(seed, logprobs=seed) for seed in (1, 2, 3)]
    outputs = engine.generate(PROMPTS, params)
    stream = engine.stream(PROMPTS, params)
    deltas = list(stream)
    for index, output in enumerate(outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == output.token_ids
        assert "".join(delta.text for delta in own) == output.text
        assert [entry for delta in own for entry in delta.logprobs or []] == output.logprobs
        assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + [output.finish_reason]
        assert any(len(delta.token_ids) > 1 for delta in own)
    assert [delta.index for delta in deltas[:4]] == [0, 1, 0, 1]
    assert list(stream.outputs()) == list(outputs)
    assert stream.stats.num_emitted_tokens == outputs.stats.num_emitted_tokens == 48
    assert stream.stats.num_collectives == outputs.stats.num_collectives


def test_a_cancelled_request_gives_its_slot_and_blocks_to_the_next_which_runs_as_if_alone(
    engine: Engine,
) -> None:
    params = [sampled(1, 60), sampled(2, 30), sampled(3)]
    alone = engine.generate([PROMPTS[2]], params[2])
    neighbour = engine.generate([PROMPTS[1]], params[1])
    with engine.stream(PROMPTS, params) as stream:
        cancelled_at, third_at = 0, 0
        for number, delta in enumerate(stream):
            if delta.index == 0 and not cancelled_at and number > 4:
                assert engine.num_free_slots == 0
                num_free = engine.num_free_kv_blocks
                assert stream.cancel(0)
                assert not stream.cancel(0)
                assert engine.num_free_slots == 1
                assert engine.num_free_kv_blocks > num_free
                cancelled_at = number
            if delta.index == 2 and not third_at:
                third_at = number
        outputs = stream.outputs()
    assert 0 < cancelled_at < third_at <= cancelled_at + 4
    assert outputs[0].finish_reason == "cancelled"
    assert 0 < len(outputs[0].token_ids) < 60
    assert outputs[1].token_ids == neighbour[0].token_ids
    assert outputs[2].token_ids == alone[0].token_ids


def test_the_last_delta_of_a_cancelled_request_says_so(engine: Engine) -> None:
    with engine.stream(["one", "two", "waits"], sampled(5, 30)) as stream:
        first = next(stream)
        assert first.finish_reason is None
        assert stream.cancel(2)
        assert stream.cancel(0)
        reasons = {d.index: d.finish_reason for d in stream if d.finish_reason is not None}
    assert reasons == {0: "cancelled", 1: "length", 2: "cancelled"}
    assert stream.outputs()[2].token_ids == []
    assert not stream.cancel(1)


def test_a_stream_that_is_left_early_cancels_what_is_left(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, sampled(4))
    with engine.stream(PROMPTS, sampled(4, 60)) as stream:
        next(stream)
        with pytest.raises(ConfigError, match="cannot generate") as error:
            engine.generate(["busy"])
        assert "a stream that is still open" in error.value.got
    assert {output.finish_reason for output in stream.outputs()} == {"cancelled"}
    assert [output.token_ids for output in engine.generate(PROMPTS, sampled(4))] == [
        output.token_ids for output in expected
    ]


def test_an_error_of_the_consumer_leaves_the_engine_usable(engine: Engine) -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(["a", "b"], [sampled(1, 2), sampled(2, 40)], on_finish=fail)
    assert len(engine.generate(["a"], sampled(1, 2))[0].token_ids) == 2


def test_only_prompts_of_the_stream_can_be_cancelled(engine: Engine) -> None:
    with (
        engine.stream(["a"], sampled(1, 4)) as stream,
        pytest.raises(AdmissionError, match="no such request to cancel"),
    ):
        stream.cancel(1)
