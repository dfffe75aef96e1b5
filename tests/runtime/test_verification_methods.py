"""Methods `block` and `synthetic` through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specreg.config import EngineConfig
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams

PROMPTS = ["hello world", "a", "x = y"]
NUM_SPECULATIVE_TOKENS = 3


def run(target: Path, draft: Path, num_tokens: int, temperature: float, **speculative: Any) -> Any:
    config = {
        "target": str(target),
        "max_model_len": 96,
        "memory_budget_gib": 0.1,
        "max_num_seqs": 3,
        "speculative": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            "draft_sample_method": "probabilistic",
            **speculative,
        },
    }
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=7, ignore_eos=True)
    ]
    with Engine.from_config(EngineConfig.parse(config)) as engine:
        return engine.generate(PROMPTS, params * len(PROMPTS))


def test_greedy_tokens_are_the_same_by_blocks(tiny_target: Path, tiny_draft: Path) -> None:
    standard = run(tiny_target, tiny_draft, 12, 0.0)
    block = run(tiny_target, tiny_draft, 12, 0.0, rejection_sample_method="block")
    assert [o.token_ids for o in block] == [o.token_ids for o in standard]


def test_blocks_keep_as_many_drafts_of_the_target_itself_as_there_are(tiny_target: Path) -> None:
    outputs = run(tiny_target, tiny_target, 12, 1.0, rejection_sample_method="block")
    assert outputs.stats.num_accepted_tokens == outputs.stats.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({"synthetic_acceptance_rates": [1.0, 1.0, 0.0]}, [1.0, 1.0, 0.0]),
        ({"synthetic_acceptance_length": 2.0}, [1.0, 0.0, 0.0]),
        ({"synthetic_acceptance_length": 4}, [1.0, 1.0, 1.0]),
    ],
)
def test_synthetic_accepts_what_is_configured(
    tiny_target: Path,
    tiny_draft: Path,
    keys: dict[str, Any],
    accepted: list[float],
    temperature: float,
) -> None:
    # Behind the first token come 24, a multiple of every round's length: none is cut short.
    outputs = run(
        tiny_target, tiny_draft, 25, temperature, rejection_sample_method="synthetic", **keys
    )
    stats = outputs.stats
    shares = [count / stats.num_drafts for count in stats.num_accepted_by_position]
    assert shares == accepted
