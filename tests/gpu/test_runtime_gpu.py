"""The runtime on a GPU: the tokens of the CPU, graphs that equal eager runs, one synchronisation a
step, and the memory that the plan names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from specreg.config import EngineConfig
from specreg.errors import PluginError
from specreg.runtime.cuda_graphs import CapturedFunction, GraphPool, GraphSizes
from specreg.runtime.engine import Engine
from specreg.runtime.model_runner import ModelRunner
from specreg.sampling_params import SamplingParams
from specreg.testing.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

K = 3
PROMPTS = ["hello world", "a", "The quick brown fox jumps over the lazy dog", "(1, 2, 3)", "x = y"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MIXED = [
    SamplingParams(max_tokens=length, temperature=temperature, seed=length, ignore_eos=True)
    for length, temperature in [(24, 0.8), (9, 0.0), (17, 1.3), (30, 1.0), (3, 0.5)]
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(target, draft) of a kind: the draft is the target with noise on its weights."""

    def make(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            target = save_tiny_model(kind, tmp_path_factory.mktemp(f"{kind}-target"))
            draft = save_tiny_model(kind, tmp_path_factory.mktemp(f"{kind}-draft"))
            weights = load_file(draft / "model.safetensors")
            generator = torch.Generator().manual_seed(1)
            for name, weight in weights.items():
                noise = torch.randn(weight.shape, generator=generator)
                weights[name] = weight + 0.1 * weight.std() * noise if weight.dim() > 1 else weight
            save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
            made[kind] = target, draft
        return made[kind]

    made: dict[str, tuple[Path, Path]] = {}
    return make


def engine_for(
    checkpoints: Any, kind: str = "llama", *, drafts: str | None, **config: Any
) -> Engine:
    target, draft = checkpoints(kind)
    speculative = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": K,
        "draft_sample_method": drafts,
        **config.pop("speculative", {}),
    }
    if drafts is not None:
        config["speculative"] = speculative
    config = {"max_model_len": 96, "num_kv_blocks": 64, "device": "cuda", **config}
    return Engine.from_config(EngineConfig.parse({"target": str(target), **config}))


def tokens(outputs: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_greedy_decoding_on_the_gpu_equals_the_cpu_with_and_without_drafts(
    checkpoints: Any, kind: str
) -> None:
    runs = [
        {"drafts": None, "device": "cpu", "memory_budget_gib": 0.1},
        {"drafts": None},
        {"drafts": "greedy"},
        {"drafts": "probabilistic", "max_num_batched_tokens": 40},
        {"drafts": "probabilistic", "enforce_eager": True},
    ]
    if kind == "gpt_oss":  # whose routing waits for the host
        runs = [{**run, "speculative": {"enforce_eager": True}} for run in runs]
    outputs = []
    for run in runs:
        with engine_for(checkpoints, kind, **run) as engine:
            outputs.append(tokens(engine.generate(PROMPTS, GREEDY)))
    assert outputs[1:] == [outputs[0]] * 4


def cells(engine: Engine) -> list[torch.Tensor]:
    """Everything that a run leaves in its caches."""
    cache = engine.models.drafting.draft_logits
    pool = engine.models.kv_pool
    # Writes of padding go nowhere: the null block is not looked at.
    kv = [tensor[1:].clone() for tensor in (*pool.keys, *pool.values)]
    return [cache.logits.clone(), cache.temperature.clone(), cache.logsumexp.clone(), *kv]


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8], [8], [2]])
def test_graphs_equal_eager_runs_in_tokens_and_in_every_cache_cell(
    checkpoints: Any, sizes: list[int]
) -> None:
    results = []
    for is_eager in (True, False):
        config = {"enforce_eager": is_eager, "cuda_graph_sizes": sizes}
        with engine_for(checkpoints, drafts="probabilistic", **config) as engine:
            engine.models.drafting.draft_logits.logits.zero_()
            runner = engine._core._runner
            captured = [] if is_eager else sizes
            assert list(runner.proposer.draft.captured_sizes) == captured
            assert list(runner.padded_verifier.decide.captured_sizes) == captured
            first = engine.generate(PROMPTS, MIXED)
            second = engine.generate(PROMPTS[::-1], MIXED)  # other inputs, other slots
            results.append((tokens(first), tokens(second), cells(engine), first.stats))
    (eager, graphed) = results
    assert graphed[:2] == eager[:2]
    assert all(map(torch.equal, graphed[2], eager[2]))
    assert graphed[3].num_accepted_by_position == eager[3].num_accepted_by_position
    assert graphed[3].acceptance_length > 1.2


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_a_step_synchronises_once(
    checkpoints: Any, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    execute = ModelRunner.execute

    def counted(self: ModelRunner, plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                output = execute(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        messages = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        counts.append((len(plan.rows) > 0, messages))
        return output

    with engine_for(checkpoints, drafts=drafts) as engine:
        engine.generate(PROMPTS, MIXED)
        monkeypatch.setattr(ModelRunner, "execute", counted)
        engine.generate(PROMPTS, MIXED)
    assert len(counts) > 5
    assert all(len(messages) == has_rows for has_rows, messages in counts), counts


def test_drafting_alone_can_be_kept_out_of_graphs(checkpoints: Any) -> None:
    plain = {"enforce_eager": True}
    with engine_for(checkpoints, drafts="greedy", speculative=plain) as engine:
        runner = engine._core._runner
        assert runner.proposer.draft.captured_sizes == ()
        assert runner.padded_verifier.decide.captured_sizes == (1, 2, 4, 8)


def test_cut_offs_processors_and_log_probabilities_run_beside_graphs(checkpoints: Any) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, seed=2, top_p=0.7, ignore_eos=True),
    ]
    results = []
    for device in ("cpu", "cuda"):
        config = {"device": device, "memory_budget_gib": 0.1}
        with engine_for(checkpoints, drafts="probabilistic", **config) as engine:
            results.append(tokens(engine.generate(PROMPTS[:3], params)))
    assert results[0][1] == results[1][1]
    assert [len(row) for row in results[1]] == [12, 12, 12]


def test_a_replay_reads_what_its_buffers_hold_and_leaves_earlier_results_alone() -> None:
    buffer = torch.zeros(8, device="cuda")
    calls = []

    def double(size: int) -> list[torch.Tensor]:
        calls.append(size)
        return [buffer[:size] * 2]

    pool = GraphPool(torch.cuda.graph_pool_handle())
    doubled = CapturedFunction("double", double, GraphSizes((4, 8), is_captured=True), pool)
    results = []
    for number, size in enumerate([4, 4, 8, 4, 8, 3]):
        buffer.fill_(number)
        results.append(doubled(size)[0])
    assert [result.tolist() for result in results] == [
        [2.0 * number] * size for number, size in enumerate([4, 4, 8, 4, 8, 3])
    ]
    assert calls == [4, 4, 8, 8, 3]  # each size ran once and was recorded once; 3 has no graph
    assert doubled.captured_sizes == (4, 8)


def test_what_a_graph_cannot_hold_is_an_error_that_says_what_to_do() -> None:
    buffer = torch.ones(4, device="cuda")
    sizes = GraphSizes((4,), is_captured=True)
    waits = CapturedFunction("draft of waiter", lambda _: [buffer * buffer.sum().item()], sizes)
    with pytest.raises(
        PluginError, match=r"draft of waiter cannot be captured[\s\S]*enforce_eager"
    ):
        waits(4)
    assert float((buffer * 2).sum()) == 8.0
