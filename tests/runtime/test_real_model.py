"""A real language model: greedy runs equal transformers' own, and sharding changes no token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specreg.config import EngineConfig
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.runtime.models import resolve_model
from specreg.sampling_params import SamplingParams

NAME = "smollm2-135m-instruct"
K = 3
NUM_TOKENS = 24
LARGEST_TIE = 1e-4
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "import numpy as np\n",
    "In 1969, the first human",
    "A recipe for pancakes: mix flour,",
    "Dear Sir or Madam,",
    "The square root of 144 is",
    "SELECT name FROM users WHERE",
    "Photosynthesis is the process by which",
    "My favourite season is autumn because",
    "The largest planet in the solar system",
    "To be, or not to be,",
    "1, 1, 2, 3, 5, 8,",
    "She opened the door and",
    "The opposite of hot is",
    "Machine learning models are trained",
    "Ladies and gentlemen, tonight",
]


class Reference:
    """transformers' own greedy continuations and logits, in fp32."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = resolve_model(NAME)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self._known: dict[str, list[int]] = {}

    def prompt_ids(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])

    def continuation(self, prompt: str) -> list[int]:
        if prompt not in self._known:
            ids = torch.tensor([self.prompt_ids(prompt)])
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
            self._known[prompt] = output[0, ids.shape[1] :].tolist()
        return self._known[prompt]

    @torch.no_grad()
    def gap(self, prompt: str, continuation: list[int]) -> float:
        """Between the two largest logits of the token behind `continuation`."""
        ids = torch.tensor([self.prompt_ids(prompt) + continuation])
        first, second = self.model(ids).logits[0, -1].topk(2).values.tolist()
        return float(first - second)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def noisy_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target with a little noise on its weights: accepted often, not always."""
    import shutil

    source, copy = resolve_model(NAME), tmp_path_factory.mktemp("noisy") / "model"
    shutil.copytree(source, copy)
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + 0.06 * weight.std() * noise
    save_file(weights, Path(copy, "model.safetensors"), metadata={"format": "pt"})
    return str(copy)


def run(
    prompts: list[str], params: SamplingParams, draft: str | None = None, **config: Any
) -> GenerateOutputs:
    if draft is not None:
        config["speculative"] = {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": K,
            "draft_sample_method": "probabilistic",
        }
    config = {"target": NAME, "max_model_len": 128, "max_num_seqs": 4, **config}
    with Engine.from_config(EngineConfig.parse(config)) as engine:
        return engine.generate(prompts, params)


def count_near_ties(outputs: GenerateOutputs, prompts: list[str], reference: Reference) -> int:
    """Outputs that leave the reference, each of which must do so at a near-tie."""
    num_ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.continuation(prompt)
        if output.token_ids == expected:
            continue
        same = next(
            i for i, (a, b) in enumerate(zip(expected, output.token_ids, strict=True)) if a != b
        )
        gap = reference.gap(prompt, expected[:same])
        assert gap < LARGEST_TIE, f"{prompt!r} leaves at token {same}, where the gap is {gap}"
        num_ties += 1
    return num_ties


GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=5, ignore_eos=True)
SHARDED = {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True}
RUNS = {
    "without a speculator": {},
    "with drafts": {"draft": True},
    "with drafts, two ranks": {"draft": True, **SHARDED},
    "with drafts, two ranks, every rank verifies all": {"draft": True, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("num_prompts", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_greedy_decoding_equals_transformers_but_for_near_ties(
    kind: str,
    num_prompts: int,
    reference: Reference,
    noisy_draft: str,
    record_property: pytest.RecordProperty,
) -> None:
    config = dict(RUNS[kind])
    draft = noisy_draft if config.pop("draft", False) else None
    prompts = PROMPTS[:num_prompts]
    outputs = run(prompts, GREEDY, draft, **config)
    num_ties = count_near_ties(outputs, prompts, reference)
    record_property("near_ties", num_ties)
    assert num_ties <= num_prompts // 10
    if draft is not None:
        assert 1.5 < outputs.stats.acceptance_length < K + 1


def test_sampled_tokens_do_not_depend_on_sharding_and_acceptance_not_on_who_verifies(
    noisy_draft: str,
) -> None:
    prompts = PROMPTS[:4]
    off = run(prompts, SAMPLED, noisy_draft, **SHARDED, draft_logits_sharding="off")
    auto = run(prompts, SAMPLED, noisy_draft, **SHARDED)
    base = run(prompts, SAMPLED, noisy_draft, tensor_parallel_size=2)
    assert [o.token_ids for o in auto] == [o.token_ids for o in off]
    assert auto.stats.draft_logits_bytes_per_rank * 2 == off.stats.draft_logits_bytes_per_rank
    assert auto.stats.num_kv_blocks > off.stats.num_kv_blocks
    # Accepted drafts a step lie in 0..K: their standard deviation is at most K / 2.
    noise = K / 2 * math.sqrt(1 / auto.stats.num_drafts + 1 / base.stats.num_drafts)
    difference = abs(auto.stats.acceptance_length - base.stats.acceptance_length)
    assert difference < 3 * noise
