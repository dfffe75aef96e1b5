from __future__ import annotations

import pytest
from fake_distributions import install
from toy_plugins import ToyPlugin, spec

from specreg import registry
from specreg.capabilities import DraftLogitsLayout
from specreg.config import EngineConfig, SpeculativeConfig
from specreg.errors import ConfigError, PluginError, UnknownMethodError
from specreg.plugin import DraftWatermarkerFactory, PolicyRule, RejectionSamplerFactory
from specreg.policy import resolve
from specreg.registry import Registry


def test_what_is_registered_is_told_in_an_order_of_its_own():
    rules = [PolicyRule(name, lambda inputs: (True, "")) for name in ("b-rule", "a-rule")]
    plugins = [
        ToyPlugin(spec("z"), spec("a"), name="one", rules=rules[:1]),
        ToyPlugin(spec("m"), spec("a"), name="another", rules=rules[1:]),
    ]
    for order in (plugins, plugins[::-1]):
        loaded = Registry.from_plugins(order)
        assert [(e.spec.name, e.distribution) for e in loaded.speculators] == [
            ("a", "another"),
            ("a", "one"),
            ("m", "another"),
            ("z", "one"),
        ]
        assert [rule.name for rule in loaded.policy_rules] == ["a-rule", "b-rule"]


def test_the_registry_of_a_process_is_loaded_once():
    assert registry.get_registry() is registry.get_registry()


SAMPLERS = [RejectionSamplerFactory("lossy", "m:make"), RejectionSamplerFactory("exact", "m:make")]
WATERMARKERS = [DraftWatermarkerFactory("keyed", "m:make", honors_owner_mask=True)]


def test_samplers_and_watermarkers_are_found_by_name():
    plugin = ToyPlugin(rejection_samplers=SAMPLERS, draft_watermarkers=WATERMARKERS)
    loaded = Registry.from_plugins([plugin])
    assert loaded.rejection_sampler("lossy") is SAMPLERS[0]
    assert loaded.draft_watermarker("keyed") is WATERMARKERS[0]


def test_a_sampler_that_declares_nothing_reads_a_replicated_dense_cache():
    sampler = RejectionSamplerFactory("plain", "m:make")
    assert not sampler.accepts_sharded_draft_logits
    assert sampler.reads_layouts == {DraftLogitsLayout.DENSE}


def test_an_unknown_sampler_or_watermarker_gets_the_nearest_spelling():
    loaded = Registry.from_plugins([ToyPlugin(rejection_samplers=SAMPLERS)])
    with pytest.raises(ConfigError, match=r"no rejection sampler 'lossi'[\s\S]*mean 'lossy'"):
        loaded.rejection_sampler("lossi")
    with pytest.raises(ConfigError, match=r"no draft watermarker 'keyed'[\s\S]*known: none"):
        loaded.draft_watermarker("keyed")


def test_a_name_that_two_plugins_register_is_an_error_that_names_both():
    plugins = [ToyPlugin(name=name, rejection_samplers=SAMPLERS) for name in ("one", "two")]
    with pytest.raises(PluginError, match=r"one 0\) and two"):
        Registry.from_plugins(plugins).rejection_sampler("lossy")


def test_a_disabled_plugin_is_mentioned_when_its_method_is_asked_for():
    loaded = registry.load({"SPECREG_DISABLE_PLUGINS": "specreg"})
    assert loaded.speculators == ()
    source = loaded.left_out[0]
    with pytest.raises(UnknownMethodError, match="left out by the environment"):
        loaded.select(SpeculativeConfig(method=source.name))
    with pytest.raises(
        ConfigError, match=r"offers no speculator[\s\S]*left out by the environment"
    ):
        loaded.select(SpeculativeConfig(method=source.name, plugin="specreg"))


ACME = """
from dataclasses import replace
from specreg.plugin import hookimpl
import specreg_draft_model

def supports_batch_sharded_draft_logits():
    raise RuntimeError("an unrelated function of the plugin was called")

@hookimpl
def specreg_speculators():
    (base,) = specreg_draft_model.specreg_speculators()
    return [replace(base, name="acme", methods=("acme",), factory="acme_code:AcmeSpeculator")]
"""
ACME_CODE = """
from specreg_draft_model.speculator import DraftModelSpeculator

class AcmeSpeculator(DraftModelSpeculator):
    pass
"""


def test_a_strangers_subclass_of_a_built_in_is_selected_by_config_and_gets_the_cache(
    tmp_path, monkeypatch
):
    install(
        tmp_path,
        "acme-drafts",
        entry_points={"acme": "acme_plugin"},
        modules={"acme_plugin": ACME, "acme_code": ACME_CODE},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EngineConfig.parse(
        {
            "speculative_config": {
                "method": "acme",
                "model": "absent",
                "num_speculative_tokens": 3,
                "draft_sample_method": "probabilistic",
            },
            "tensor_parallel_size": 2,
            "enable_batch_sharded_sampling": True,
            "vocab_size": 100,
            "dtype": "float32",
        }
    )
    plan = resolve(config, registry.load({}))
    assert (plan.speculator, plan.distribution) == ("acme", "acme-drafts")
    assert plan.num_shards == 2
    assert plan.bytes_per_rank == 4 * 3 * 100 * 4
