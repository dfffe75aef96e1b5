"""Every drafter of states and blocks, with random weights, before a real language model.

Next to none of its drafts is accepted, and the output is exactly the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specreg.config import EngineConfig
from specreg.errors import SpecregError
from specreg.registry import get_registry
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.runtime.models import resolve_model
from specreg.sampling_params import SamplingParams
from specreg.testing import save_random_drafter

TARGET = "smollm2-135m-instruct"
PROMPTS = ["The capital of France is", "1, 1, 2, 3, 5, 8,", "def fibonacci(n):\n"]
NUM_TOKENS = 8
# Drafters that read the keys and values of one family of targets alone.
OTHER_TARGETS = {"gemma4"}
DRAFTERS = sorted(
    entry.spec.name
    for entry in get_registry().speculators
    if entry.spec.random_drafter is not None and entry.spec.name not in OTHER_TARGETS
)


def generate(**keys: Any) -> GenerateOutputs:
    config = {"target": TARGET, "max_num_seqs": 4, "max_model_len": 64, "memory_budget_gib": 1.5}
    with Engine.from_config(EngineConfig.parse(config | keys)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return engine.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [output.token_ids for output in generate()]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_the_targets_whatever_is_drafted(
    name: str, tp: int, expected: list[list[int]], tmp_path: Path
) -> None:
    speculative = save_random_drafter(name, tmp_path / "draft", TARGET)
    outputs = generate(
        speculative=speculative | {"num_speculative_tokens": 2},
        tensor_parallel_size=tp,
        enable_batch_sharded_sampling=tp > 1,
    )
    assert [output.token_ids for output in outputs] == expected
    assert outputs.stats.num_drafts > 0


@pytest.mark.parametrize("name", sorted(OTHER_TARGETS))
def test_a_drafter_of_other_targets_says_so(name: str, tmp_path: Path) -> None:
    assert resolve_model(TARGET).is_dir()
    with pytest.raises(SpecregError):
        save_random_drafter(name, tmp_path / "draft", TARGET)
