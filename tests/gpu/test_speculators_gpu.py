"""Every installed speculator on a GPU: the kit in half precision, graphs, the tokens of the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from specreg.config import EngineConfig
from specreg.registry import get_registry
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
from specreg.testing import CHECKS, Lab, Subject, tiny_subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

NAMES = sorted(entry.spec.name for entry in get_registry().speculators)
# Processes of several ranks need a device each; ranks that take turns share one.
ELSEWHERE = "ranks: processes over gloo agree with ranks in turn"
PROMPTS = [[3, 4, 5, 6, 3, 4, 5], [7], [8, 9] * 9, [5, 3, 5, 3, 5], [11, 12, 13]]
PARAMS = [
    SamplingParams(max_tokens=length, temperature=temperature, seed=length, ignore_eos=True)
    for length, temperature in [(24, 0.8), (9, 0.0), (17, 1.3), (30, 1.0), (3, 0.5)]
]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Subject] = {}

    def make(name: str) -> Subject:
        if name not in made:
            made[name] = tiny_subject(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_promise_is_kept_in_half_precision(name: str, dtype: str, subjects: Any) -> None:
    subject = replace(subjects(name), device="cuda", dtype=dtype)
    with Lab(subject, (1, 2)) as lab:
        results = [check.run(lab) for check in CHECKS if check.name != ELSEWHERE]
    broken = [f"{r.check}: {line}" for r in results if not r.is_ok for line in r.reasons]
    assert not broken, "\n".join(broken)


def engine_for(subject: Subject, drafts: str, **config: Any) -> Engine:
    speculative = {**subject.speculative, "draft_sample_method": drafts}
    return Engine.from_config(
        EngineConfig.parse(
            {
                "target": subject.target,
                "speculative": speculative,
                "max_model_len": 96,
                "num_kv_blocks": 64,
                "device": "cuda",
                **config,
            }
        )
    )


def cells(engine: Engine) -> list[torch.Tensor]:
    """What a run leaves in its caches; the null block, which padding writes to, left out."""
    assert engine.models.drafting is not None
    cache, pool = engine.models.drafting.draft_logits, engine.models.kv_pool
    kept = [tensor[1:].clone() for tensor in (*pool.keys, *pool.values)]
    if cache is not None:
        kept += [cache.temperature.clone(), cache.logsumexp.clone(), cache.logits.clone()]
    return kept


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_equal_eager_runs_in_tokens_and_in_every_cache_cell(
    name: str, drafts: str, subjects: Any
) -> None:
    subject = subjects(name)
    results, captured = [], ()
    for is_eager in (True, False):
        with engine_for(subject, drafts, enforce_eager=is_eager, cuda_graph_sizes=[2, 8]) as engine:
            drafting = engine.models.drafting
            assert drafting is not None
            if drafting.draft_logits is not None:
                drafting.draft_logits.logits.zero_()
            first = engine.generate(PROMPTS, PARAMS)
            second = engine.generate(PROMPTS[::-1], PARAMS)  # other inputs, fewer live rows
            tokens = [[output.token_ids for output in run] for run in (first, second)]
            results.append((tokens, cells(engine)))
            captured = engine._core._runner.proposer.draft.captured_sizes
            is_safe = drafting.plan.inputs.capabilities.is_cuda_graph_safe
    assert captured == ((2, 8) if is_safe else ())
    assert results[1][0] == results[0][0]
    assert all(map(torch.equal, results[1][1], results[0][1]))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_on_the_gpu_are_those_of_the_cpu(name: str, subjects: Any) -> None:
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outputs = []
    for config in ({"device": "cpu", "memory_budget_gib": 0.1}, {}):
        with engine_for(subjects(name), "greedy", **config) as engine:
            outputs.append([output.token_ids for output in engine.generate(PROMPTS, greedy)])
    assert outputs[0] == outputs[1]
