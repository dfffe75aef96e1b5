"""Rejection samplers of plugins, selected by name, and the guard of what they may be handed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_distributions
import pytest
import torch

from specreg.config import EngineConfig
from specreg.draft_logits import DraftLogitsCache
from specreg.errors import ConfigError, InternalError, PluginError
from specreg.ownership import Shard
from specreg.registry import get_registry
from specreg.rejection_sampler import RejectionSampler
from specreg.runtime.engine import Engine, GenerateOutputs
from specreg.runtime.loading import make_rejection_sampler
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.verifier import Verifier
from specreg.sampling_params import SamplingParams

PLUGIN = """
from specreg.plugin import RejectionSamplerFactory, hookimpl

@hookimpl
def specreg_rejection_samplers():
    return [
        RejectionSamplerFactory("plain", "toy_samplers:Plain"),
        RejectionSamplerFactory(
            "sharded", "toy_samplers:Sharded", accepts_sharded_draft_logits=True
        ),
        RejectionSamplerFactory("nothing", "toy_samplers:nothing"),
    ]
"""
SAMPLERS = """
from specreg.rejection_sampler import RejectionSampler

class Plain:
    def __init__(self, context):
        self.context, self.shards = context, set()
        self._stock = RejectionSampler(vocab_size=context.vocab_size)

    def __call__(self, inputs):
        self.shards.add(None if inputs.draft_logits is None else inputs.draft_logits.num_shards)
        return self._stock(inputs)

class Sharded(Plain):
    accepts_sharded_draft_logits = True

def nothing(context):
    return None
"""
PROMPTS = ["hello world", "a", "x = y"]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=t, seed=7, ignore_eos=True) for t in (0.8, 1.2, 0.0)
]


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The toy plugin in a folder that this process and the ranks it starts look into."""
    folder = tmp_path_factory.mktemp("site")
    fake_distributions.install(
        folder,
        "toy-samplers",
        entry_points={"toy": "toy_sampler_hooks"},
        modules={"toy_sampler_hooks": PLUGIN, "toy_samplers": SAMPLERS},
    )
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(folder)
        get_registry.cache_clear()
        yield
    get_registry.cache_clear()
    for module in ("toy_sampler_hooks", "toy_samplers"):
        sys.modules.pop(module, None)


def run(target: Path, draft: Path, sampler: str | None, **extra: Any) -> tuple[Any, Any]:
    config = {
        "target": str(target),
        "max_model_len": 96,
        "memory_budget_gib": 0.1,
        "max_num_seqs": 2,
        "tensor_parallel_size": 2,
        "enable_batch_sharded_sampling": True,
        "rejection_sampler": sampler,
        "speculative": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        },
        **extra,
    }
    with Engine.from_config(EngineConfig.parse(config)) as engine:
        outputs: GenerateOutputs = engine.generate(PROMPTS, PARAMS)
        assert engine.plan is not None
        return engine, [output.token_ids for output in outputs]


def test_the_named_sampler_verifies_and_gets_what_it_declares(
    tiny_target: Path, tiny_draft: Path
) -> None:
    _, expected = run(tiny_target, tiny_draft, None, draft_logits_sharding="off")
    for name, num_shards in (("plain", 1), ("sharded", 2)):
        engine, tokens = run(tiny_target, tiny_draft, name)
        sampler = engine.models.rejection_sampler
        assert type(sampler).__name__.lower() == name
        assert sampler.shards == {num_shards}
        assert sampler.context.vocab_size == engine.models.target.vocab_size
        assert engine.plan.num_shards == num_shards
        verdicts = {verdict.rule: verdict for verdict in engine.plan.verdicts}
        assert verdicts["stock-rejection-sampler"].passed is (num_shards == 2)
        assert tokens == expected


def make(name: str) -> object:
    config = EngineConfig.parse({"rejection_sampler": name})
    return make_rejection_sampler(config, 37, torch.device("cpu"))


def test_a_name_that_nobody_registers_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no rejection sampler 'plane'") as error:
        make("plane")
    assert "plain" in error.value.got


def test_a_factory_that_gives_no_sampler_is_named() -> None:
    with pytest.raises(PluginError, match="'nothing' gives no rejection sampler"):
        make("nothing")


def test_a_sampler_that_does_not_declare_it_is_never_handed_a_sharded_cache() -> None:
    """The policy decides otherwise; this guards an engine that forgot to ask it."""
    device = torch.device("cpu")
    cache: Any = object.__new__(DraftLogitsCache)
    cache.shard = Shard(2, 0)

    def verifier(sampler: Any) -> Verifier:
        processors = SlotProcessors(37, device, Shard(2, 0))
        return Verifier(sampler, SlotState(4, device), processors, cache, 37)

    verifier(make("sharded"))
    verifier(RejectionSampler(vocab_size=37))
    with pytest.raises(InternalError, match="sharded cache that it does not accept") as error:
        verifier(make("plain"))
    assert error.value.where == "Plain.accepts_sharded_draft_logits"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("standard", {}),
        ("block", {}),
        ("synthetic", {"synthetic_acceptance_rates": [0.9, 0.5]}),
        ("synthetic", {"synthetic_acceptance_length": 2.5}),
    ],
)
def test_the_stock_sampler_gets_the_configured_method_and_rates(
    method: str, keys: dict[str, object]
) -> None:
    speculative = {"rejection_sample_method": method, "num_speculative_tokens": 2, **keys}
    config = EngineConfig.parse({"speculative_config": speculative})
    sampler = make_rejection_sampler(config, 37, torch.device("cpu"))
    assert isinstance(sampler, RejectionSampler)
    assert sampler.method == method
    rates, length = sampler.acceptance_rates, sampler.acceptance_length
    assert (None if rates is None else list(rates)) == keys.get("synthetic_acceptance_rates")
    assert length == keys.get("synthetic_acceptance_length")


def test_without_a_speculator_the_stock_sampler_draws_from_the_target() -> None:
    sampler = make_rejection_sampler(EngineConfig.parse({}), 37, torch.device("cpu"))
    assert isinstance(sampler, RejectionSampler)
    assert sampler.method == "standard"
