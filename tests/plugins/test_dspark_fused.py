"""Fused samplers of DSpark: which one is chosen, what is seen of its writes, what that costs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import specreg_dspark
import torch
from editable_projects import EXAMPLES, install_project
from markov_toys import (
    VOCAB_SIZE,
    SamplersPlugin,
    another_logsumexp,
    changing,
    make_choice,
    make_inputs,
    make_probe,
    sampler_spec,
)
from specreg_dspark.hooks import DSparkHooks, MarkovSamplerSpec
from specreg_dspark.sampler_choice import STOCK
from specreg_dspark.sentinel_cells import SentinelCells
from specreg_dspark.stock_sampler import sample_stock
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.config import EngineConfig
from specreg.errors import ConfigError, PluginError
from specreg.ownership import Shard
from specreg.policy import resolve
from specreg.registry import Registry, load

DENSE, DRAFT_VOCAB = DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB
HONEST = SamplersPlugin(sampler_spec("honest"))


def test_on_a_cpu_the_loop_draws_and_on_a_gpu_the_stock_sampler():
    assert make_choice().name is None
    assert not make_choice().is_active
    assert make_choice(device="cuda").name == "markov_sample"


@pytest.mark.parametrize("options", [{"fused_sampling": "require"}, {"fused_sampler": STOCK.name}])
def test_the_stock_sampler_can_be_asked_for_on_a_cpu_and_keeps_the_opt_in(options):
    choice = make_choice(tp=4, **options)
    assert choice.name == "markov_sample"
    assert choice.opt_out_reason == ""


def test_the_stock_sampler_stores_a_reduced_vocabulary_in_both_layouts():
    probe = make_probe(3, (DENSE, DRAFT_VOCAB), torch.arange(0, VOCAB_SIZE, 2))
    choice = make_choice(tp=3, probe=probe, fused_sampling="require")
    assert (choice.name, choice.opt_out_reason) == ("markov_sample", "")


def test_off_leaves_the_loop_whatever_is_installed():
    assert make_choice(HONEST, device="cuda", fused_sampling="off").name is None


def test_one_of_a_plugin_comes_before_the_stock_one():
    assert make_choice(HONEST, device="cuda").name == "honest"
    assert make_choice(HONEST).name == "honest"


def test_a_predicate_sees_the_draft_config_and_the_device():
    spec = sampler_spec("honest", predicate=lambda c, d: (c["rank"], d.type) == (4, "cuda"))
    plugin = SamplersPlugin(spec)
    assert make_choice(plugin, device="cuda", draft_config={"rank": 4}).name == "honest"
    assert make_choice(plugin, device="cuda", draft_config={"rank": 5}).name == "markov_sample"
    with pytest.raises(ConfigError, match="whose predicate refuses the drafter or cpu"):
        make_choice(plugin, draft_config={"rank": 4}, fused_sampler="honest")


def test_two_that_apply_are_an_error_that_names_both_and_one_can_be_named():
    plugins = HONEST, SamplersPlugin(sampler_spec("other", "honest"), name="other-samplers")
    with pytest.raises(PluginError, match=r"honest of toy-samplers and .* other of other"):
        make_choice(*plugins)
    assert make_choice(*plugins, fused_sampler="other").name == "other"
    twice = HONEST, SamplersPlugin(sampler_spec("honest"), name="other-samplers")
    with pytest.raises(PluginError, match="several fused samplers"):
        make_choice(*twice, fused_sampler="honest")


def test_a_name_that_there_is_not_gets_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'markov_sample'"):
        make_choice(fused_sampler="markov_smaple")


@pytest.mark.parametrize("obstacle", ["its Markov head is gated", "dspark_draft_topk is set"])
def test_where_no_fused_sampler_can_draw_the_loop_does_unless_one_is_required(obstacle):
    assert make_choice(HONEST, device="cuda", obstacle=obstacle).name is None
    with pytest.raises(ConfigError, match=f"'require', and {obstacle}"):
        make_choice(HONEST, obstacle=obstacle, fused_sampling="require")


def test_a_name_is_not_passed_over_where_it_cannot_draw():
    for obstacle in ("its Markov head is gated", "dspark_draft_topk is set"):
        with pytest.raises(ConfigError, match=f"'honest', and {obstacle}"):
            make_choice(HONEST, obstacle=obstacle, fused_sampler="honest")
    with pytest.raises(ConfigError, match="'honest', and a draft watermarker draws"):
        make_choice(HONEST, watermarker="keyed", fused_sampler="honest")


def test_a_name_beside_off_is_refused_before_anything_is_loaded():
    keys = {"fused_sampler": "honest", "fused_sampling": "off"}
    speculative = {"method": "dspark", "model": "not-there", "num_speculative_tokens": 2, **keys}
    registry = Registry.from_plugins([specreg_dspark])
    with pytest.raises(ConfigError, match=r"'honest', and fused_sampling is 'off'; remove one"):
        resolve(EngineConfig.parse({"speculative": speculative}), registry)


def test_under_a_watermarker_the_loop_draws_unless_one_is_required():
    assert make_choice(HONEST, watermarker="keyed").name is None
    with pytest.raises(ConfigError, match="'require', and a draft watermarker draws"):
        make_choice(HONEST, watermarker="keyed", fused_sampling="require")


def test_what_plugins_do_wrong_names_them():
    def failing(*_: Any) -> bool:
        raise ZeroDivisionError("no")

    with pytest.raises(PluginError, match=r"'nothing'; allowed: an iterable of MarkovSampler"):
        make_choice(SamplersPlugin("nothing"))
    with pytest.raises(PluginError, match=r"(?s)toy-samplers.*ZeroDivisionError: no"):
        make_choice(SamplersPlugin(sampler_spec("honest", predicate=failing)))
    with pytest.raises(PluginError, match="int; allowed: a callable from MarkovInputs"):
        make_choice(SamplersPlugin(sampler_spec("not_a_sampler")))
    with pytest.raises(PluginError, match="'none'>; allowed: 'full_cache' or 'sharded'"):
        sampler_spec("honest", writes=FusedSampling.NONE)
    with pytest.raises(PluginError, match=r"(?s)toy-samplers.*RuntimeError: no compiler"):
        make_choice(SamplersPlugin(sampler_spec("cannot_be_made")))
    choice = make_choice(SamplersPlugin(sampler_spec("raises")), drafts="greedy")
    with pytest.raises(PluginError, match=r"(?s)fused sampler raises of toy-samplers.*Assertion"):
        choice.run(make_inputs())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (sampler_spec("honest"), "'MarkovSamplerSpec' object is not iterable"),
        ((1 // n for n in (0,)), "ZeroDivisionError: .*; allowed: an iterable of Markov"),
    ],
)
def test_a_hook_that_gives_no_list_is_named(returned, message):
    plugin = SamplersPlugin()
    plugin.specs = returned
    with pytest.raises(PluginError, match=rf"(?s)distribution toy-samplers.*{message}"):
        make_choice(plugin)


def test_a_plugin_of_samplers_loads_without_this_plugin_and_is_called_with_it():
    assert not Registry.from_plugins([HONEST]).broken
    hook = "specreg_dspark_markov_samplers"
    assert Registry.from_plugins([specreg_dspark, HONEST]).call_hook(hook) == [
        ("toy-samplers", HONEST.specs)
    ]
    sections = ("When:", "How often:", "Parameters:", "Returns:", "Errors:", "Do not:")
    doc = DSparkHooks.specreg_dspark_markov_samplers.__doc__ or ""
    assert all(section in doc for section in sections)


def test_strings_are_taken_for_what_a_sampler_writes():
    spec = MarkovSamplerSpec("mine", "module:make", writes="sharded")  # type: ignore[arg-type]
    assert spec.writes is FusedSampling.SHARDED


def test_a_writer_of_the_full_cache_runs_and_costs_the_opt_in():
    spec = sampler_spec("flat_slots", writes=FusedSampling.FULL_CACHE, stores_statistics=False)
    choice = make_choice(SamplersPlugin(spec))
    assert choice.name == "flat_slots"
    assert choice.opt_out_reason == (
        "fused sampler flat_slots of toy-samplers writes the full-size cache"
    )
    assert make_choice(SamplersPlugin(spec), fused_sampling="require").name == "flat_slots"


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_liar_is_named_with_the_byte_and_runs_as_what_it_is(tp):
    plugin = SamplersPlugin(sampler_spec("flat_slots", stores_statistics=False))
    choice = make_choice(plugin, tp=tp)
    assert choice.opt_out_reason == (
        f"fused sampler flat_slots of toy-samplers declares sharded, but as rank 0 of {tp} it "
        "wrote byte 0 of logits in row 2, step 0, behind the 2 rows of its cache"
    )
    assert choice.name == "flat_slots"
    with pytest.raises(PluginError, match=r"(?s)does not write what it .*byte 0 of log"):
        make_choice(plugin, tp=tp, fused_sampling="require")


# What is wrong with a toy, and whether it is right on a cache that has every request.
LIARS = {
    "every_slot_to_its_row": ("byte 0 of logits in row 0, step 0, which is no row of a", True),
    "padding_before_the_cache": ("wrote logits .* bytes before the cache", False),
    "one_state": ("byte 0 of state in row 0, step 0", False),
    "no_state": ("left element 0 of state in row 0, step 0 as it was, and answered True", False),
    "no_last_column": ("left element 16 of logits in row 0, step 0 as it was", False),
    "token_of_the_rank": ("rank 1 of 2 draws or declines otherwise than rank 0", True),
    "padding_is_a_token": ("it drew .* for slot -1; allowed: -1 to -1", False),
    "another_temperature": ("stored another temperature than the request's in row 0", False),
    "another_logsumexp": ("stored another logsumexp than of the logits in row 1, step 0", False),
    "another_row": ("drew other than the largest of the logits in row 0, step 0", False),
    "many_as_one": ("wrote byte 0 of logits in row 0, step 0, which is no row of a", True),
    "base_changed": ("it changed base_logits", False),
    "no_answer": ("it returned 1; allowed: True or False", False),
    "only_full_batches": ("its answer depends on which rows are live", False),
    "raises": ("it raised IndexError: index .* is out of bounds", False),
    "declines_behind_a_store": ("byte 0 of logits in row 0, step 0.*, and answered False", False),
    "declines_behind_tokens": ("it wrote tokens, and answered False", False),
    "declines_behind_a_count": ("it wrote num_nans, and answered False", False),
}


@pytest.mark.parametrize("name", LIARS)
def test_every_way_to_lie_is_seen(name):
    message, runs_on_all = LIARS[name]
    choice = make_choice(SamplersPlugin(sampler_spec(name)))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(choice.opt_out_reason)
    assert choice.opt_out_reason.startswith(f"fused sampler {name} of toy-samplers declares")
    assert choice.is_active == runs_on_all
    assert ("in a full-size one" in choice.opt_out_reason) == (not runs_on_all)


@pytest.mark.parametrize("target_ids", [None, torch.arange(0, VOCAB_SIZE, 2)])
def test_a_table_with_nan_is_not_the_fault_of_the_sampler(target_ids):
    probe = make_probe(2, (DENSE,) if target_ids is None else (DENSE, DRAFT_VOCAB), target_ids)
    probe.w1[1] = torch.nan
    choice = make_choice(HONEST, probe=probe)
    assert (choice.name, choice.opt_out_reason) == ("honest", "")
    for name in ("no_state", "always_stored"):
        choice = make_choice(SamplersPlugin(sampler_spec(name)), probe=probe)
        assert "left element 0 of state" in choice.opt_out_reason
    probe.w1[:] = torch.nan
    assert make_choice(HONEST, probe=probe).opt_out_reason == ""


def test_statistics_of_a_sampler_that_declares_none_are_not_looked_at():
    assert not make_probe()(
        another_logsumexp(None), DENSE, is_sharded=True, stores_statistics=False
    ).fault


@pytest.mark.parametrize("name", ["anchors", "positions", "idx_mapping", "temperature", "seeds"])
def test_an_input_that_a_sampler_changes_is_named(name):
    result = make_probe()(changing(name), DENSE, is_sharded=True, stores_statistics=True)
    assert result.fault == f"it changed {name}"


@pytest.mark.parametrize("name", ["w1", "w2", "target_ids"])
def test_a_sampler_that_changes_a_table_of_the_drafter_ends_the_load(name):
    probe = make_probe(2, (DENSE,), torch.arange(0, VOCAB_SIZE - 1, 2))
    with pytest.raises(PluginError, match=rf"(?s)has changed the drafter.*fused sampler, {name}"):
        probe(changing(name), DENSE, is_sharded=True, stores_statistics=True)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8])
def test_a_probe_has_no_more_rows_and_slots_than_a_run(max_num_seqs):
    seen = []

    def sampler(inputs: Any) -> bool:
        seen.append((len(inputs.tokens), int(inputs.idx_mapping.max())))
        return sample_stock(inputs)

    probe = make_probe(2, max_num_seqs=max_num_seqs)
    assert not probe(sampler, DENSE, is_sharded=True, stores_statistics=True).fault
    assert max(num_rows for num_rows, _ in seen) == max_num_seqs
    assert max(slot for _, slot in seen) <= min(max_num_seqs, 4) - 1


def test_the_first_byte_is_found_without_a_list_of_all(monkeypatch):
    cells = SentinelCells(4, Shard(2, 1), DENSE, 5, torch.float32, 3, 5, None, torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "nonzero", None)
    cells.view.logits[0, 1, 2:] = 1.0
    assert "left element 0 of logits in row 0, step 0" in cells.unwritten([1], False)
    cells.view.logits[0, 0] = 1.0
    assert "left element 0 of logits in row 0, step 1" in cells.unwritten([1], False)
    assert cells.touched([1]) == ""
    cells.view.logits[1, 2, 3] = 1.0
    assert "wrote byte 12 of logits in row 1, step 2" in cells.touched([1])
    start = cells.view.logits.storage_offset() - 3
    torch.as_strided(cells.view.logits, (2,), (1,), start)[:] = 1.0
    assert "wrote logits 5 bytes before the cache" in cells.touched([1])


def test_the_full_cache_example_asks_the_host_nothing_and_stores_live_rows_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "specreg-markov-samplers"))
    samplers = importlib.import_module("specreg_markov_samplers.samplers")
    probe = make_probe(1, max_num_seqs=4)
    for slots in ([1, -1, 0], [-1, -1, 1], [-1, -1]):
        run = probe._run(samplers.full_cache, Shard(), DENSE, slots, False)
        assert (run.fault, run.tokens is None) == ("", False)
    monkeypatch.setattr(samplers, "draft_sample", lambda logits, *_, **__: logits.argmax(1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = replace(make_inputs(), greedy=False)
        logits = inputs.base_logits.new_empty(8, 3, VOCAB_SIZE)
        view: Any = SimpleNamespace(logits=logits, layout=DENSE)
        assert samplers.full_cache(replace(inputs, cache=view))
        with pytest.raises(DynamicOutputShapeException):
            (inputs.idx_mapping >= 0).nonzero()


def test_what_never_runs_costs_no_sharding_unless_it_has_lied_about_that():
    spec = sampler_spec("no_answer", writes=FusedSampling.FULL_CACHE)
    choice = make_choice(SamplersPlugin(spec))
    assert (choice.name, choice.opt_out_reason) == (None, "")
    with pytest.raises(PluginError, match="full_cache, but it returned 1; allowed: True or False"):
        make_choice(SamplersPlugin(spec), fused_sampling="require")


def test_a_liar_that_declines_a_full_size_cache_is_named_all_the_same():
    plugin = SamplersPlugin(sampler_spec("declining_a_full_one"))
    choice = make_choice(plugin)
    assert choice.name is None
    assert choice.opt_out_reason.startswith(
        "fused sampler declining_a_full_one of toy-samplers declares sharded, but as rank 0 of 2 "
        "it wrote byte 0 of logits in row 0, step 0, which is no row"
    )
    assert choice.opt_out_reason.endswith("; and it declines a full-size one")
    with pytest.raises(PluginError, match=r"(?s)does not write what it declares.*wrote byte 0 of"):
        make_choice(plugin, fused_sampling="require")


def test_one_that_declines_the_probe_costs_nothing_and_is_not_asked_again():
    choice = make_choice(SamplersPlugin(sampler_spec("declining")))
    assert (choice.name, choice.opt_out_reason) == (None, "")
    spec = sampler_spec("declining", writes=FusedSampling.FULL_CACHE)
    assert make_choice(SamplersPlugin(spec)).opt_out_reason == ""
    with pytest.raises(PluginError, match="declined every layout"):
        make_choice(SamplersPlugin(spec), fused_sampling="require")


def test_one_that_is_required_and_declines_the_layout_of_the_run_is_refused():
    probe = make_probe(2, (DENSE, DRAFT_VOCAB), torch.arange(0, VOCAB_SIZE, 2))
    plugin = SamplersPlugin(sampler_spec("dense_alone"))
    dense, reduced, none = [
        SimpleNamespace(cache=layout and SimpleNamespace(layout=layout))
        for layout in (DENSE, DRAFT_VOCAB, None)
    ]
    choice: Any = make_choice(plugin, probe=probe, fused_sampling="require")
    for door in (dense, none):
        choice.bind(door)
    with pytest.raises(PluginError, match=r"(?s)dense_alone.*layout draft_vocab; allowed: dense"):
        choice.bind(reduced)
    free: Any = make_choice(plugin, probe=probe)
    free.bind(reduced)


def test_one_for_few_rows_is_probed_a_row_at_a_time():
    assert make_choice(SamplersPlugin(sampler_spec("for_one_row")), tp=4).name == "for_one_row"


def test_greedy_drafts_store_nothing_so_nothing_is_probed():
    plugin = SamplersPlugin(sampler_spec("flat_slots"))
    assert make_choice(plugin, drafts="greedy").name == "flat_slots"


def test_without_a_sampler_nothing_is_done():
    inputs = make_inputs()
    assert make_choice().run(inputs) is False
    assert bool((inputs.tokens == -2).all())


def test_an_answer_that_changes_for_batches_of_one_size_is_an_error():
    choice = make_choice(SamplersPlugin(sampler_spec("changing_its_mind")), drafts="greedy")
    assert choice.run(make_inputs(2))
    with pytest.raises(PluginError, match=r"False for 2 rows; allowed: .* the same"):
        choice.run(make_inputs(2))


def test_the_examples_are_found_by_their_entry_point(tmp_path, monkeypatch):
    for path in install_project(EXAMPLES / "specreg-markov-samplers", tmp_path):
        monkeypatch.syspath_prepend(path)
    offers = dict(load({}).call_hook("specreg_dspark_markov_samplers"))
    names = [spec.name for spec in offers["specreg-markov-samplers"]]
    assert names == ["owner_aware", "full_cache", "lying"]
