"""Reading the configs of block drafters, in both forms."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_cases import load
from golden_cases import GoldenCase
from specreg_dflash.backbone_config import BackboneConfig, read_backbone
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.declarations import read_fill_in
from specreg_dflash.tapped_layers import default_target_layers
from specreg_dflash.xpress.config import read_xpress

from specreg.capabilities import DraftLogitsLayout, HiddenStates
from specreg.config import SpeculativeConfig
from specreg.errors import CheckpointError, ConfigError, UnknownMethodError
from specreg.registry import get_registry
from specreg.specs import DraftSetup

HF, SPECULATORS = "checkpoint_hf", "checkpoint"


def config_of(case: str, form: str) -> dict[str, Any]:
    return json.loads((GoldenCase(case).folder / form / "config.json").read_text())


def read(config: dict[str, Any]) -> BackboneConfig:
    return read_backbone(ConfigForm.of(config))


def hf(section: dict[str, Any] | None = None, /, **top: Any) -> dict[str, Any]:
    config = config_of("dflash-3", HF) | top
    config["dflash_config"] = {**config["dflash_config"], **(section or {})}
    return config


def speculators(decoder: dict[str, Any] | None = None, /, **top: Any) -> dict[str, Any]:
    config = config_of("dflash-2", SPECULATORS) | top
    config["transformer_layer_config"] |= decoder or {}
    return config


@pytest.mark.parametrize("case", ["dflash-1", "dflash-2"])
def test_both_forms_say_the_same(case: str) -> None:
    both = [read(config_of(case, form)) for form in (HF, SPECULATORS)]
    # Only the Hugging Face form tells the depth of the target.
    assert [config.num_target_layers for config in both] == [6, None]
    fields = [{**vars(config), "num_target_layers": None} for config in both]
    assert fields[0] == fields[1]


def test_layers_that_do_not_slide_see_their_whole_block_whatever_the_flag_of_sliding_ones() -> None:
    """`sliding_window_non_causal` is written, false, even where it was never set."""
    assert read(speculators(sliding_window_non_causal=False)).is_causal == (False, True)
    assert read(speculators(sliding_window_non_causal=True)).is_causal == (False, False)
    config = config_of("dflash-1", SPECULATORS)
    assert config["sliding_window_non_causal"] is False
    assert read(config).is_causal == (False, False)


def test_ids_of_outputs_and_of_entries_name_the_same_states() -> None:
    assert read(hf({"target_layer_ids": [1, 4]})).aux_layer_ids == (2, 5)
    assert read(speculators(aux_hidden_state_layer_ids=[2, 4, 5])).aux_layer_ids == (2, 4, 5)
    without = {"target_layer_ids": None}
    entries = hf(without, eagle_aux_hidden_state_layer_ids=[2, 5])
    assert read(entries).aux_layer_ids == (2, 5)
    assert read(hf({**without, "layer_ids": [2, 5]})).aux_layer_ids == (2, 5)
    assert read(hf(without, target_layer_ids=[1, 4])).aux_layer_ids == (2, 5)
    both = hf({"target_layer_ids": [1, 4]}, eagle_aux_hidden_state_layer_ids=[2, 5])
    assert read(both).aux_layer_ids == (2, 5)


def test_ids_that_are_off_by_one_from_each_other_are_refused() -> None:
    config = hf({"target_layer_ids": [1, 4]}, eagle_aux_hidden_state_layer_ids=[1, 4])
    with pytest.raises(CheckpointError, match="does not tell which states") as caught:
        read(config)
    assert "(1, 4)" in str(caught.value)
    assert "(2, 5)" in str(caught.value)


def test_the_same_key_in_two_places_must_agree() -> None:
    agreed = hf({"target_layer_ids": [1, 4]}, target_layer_ids=[1, 4])
    assert read(agreed).aux_layer_ids == (2, 5)
    with pytest.raises(CheckpointError, match="does not tell which states") as caught:
        read(hf({"target_layer_ids": [1, 4]}, target_layer_ids=[0, 3]))
    assert "dflash_config, target_layer_ids" in str(caught.value)


@pytest.mark.parametrize("depth", [None, 6])
def test_an_empty_list_of_ids_is_no_way_to_read_the_last_hidden_state(depth: int | None) -> None:
    with pytest.raises(CheckpointError, match="does not tell which states"):
        read(hf({"target_layer_ids": []}, num_target_layers=depth))


@pytest.mark.parametrize("ids", [[4, 1], [1, 1]])
def test_ids_that_libraries_would_sort_or_merge_are_refused(ids: list[int]) -> None:
    with pytest.raises(CheckpointError, match="in no order that all libraries agree on"):
        read(hf({"target_layer_ids": ids}))


def test_ids_that_a_config_lacks_are_those_of_its_library_or_an_error() -> None:
    assert default_target_layers(30, 3) == [1, 14, 27]
    assert default_target_layers(30, 1) == [15]
    form = ConfigForm.of(hf({"target_layer_ids": None}, num_target_layers=30))
    assert read_backbone(form).aux_layer_ids == (2, 28)
    assert list(form.section._defaults["target_layer_ids"]) == [1, 27]
    for config in (
        hf({"target_layer_ids": None}, num_target_layers=None),
        speculators(aux_hidden_state_layer_ids=None),
    ):
        with pytest.raises(CheckpointError, match="does not tell which states"):
            read(config)


def test_the_mask_token_is_looked_for_in_order() -> None:
    names = ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"]
    config = hf({"mask_token_id": 1}, **{name: 2 + i for i, name in enumerate(names)})
    assert read(config).mask_token_id == 1
    config["dflash_config"]["mask_token_id"] = None
    for value, name in enumerate(names, 2):
        assert read(config).mask_token_id == value
        del config[name]
    with pytest.raises(CheckpointError, match="lacks 'mask_token_id'"):
        read(config)


# Key, value, and what of the backbone it changes.
ROUND_TRIP: list[tuple[str, Any, str]] = [
    ("vocab_size", 161, "vocab_size"),
    ("draft_vocab_size", 96, "draft_vocab_size"),
    ("target_hidden_size", 32, "target_hidden_size"),
    ("num_target_layers", 7, "num_target_layers"),
    ("has_own_lm_head", True, "has_own_head"),
    ("logit_scale", 0.5, "logit_scale"),
    ("is_causal", True, "is_causal"),
    ("num_hidden_layers", 1, "shape"),
    ("hidden_size", 32, "shape"),
    ("intermediate_size", 32, "shape"),
    ("num_attention_heads", 2, "shape"),
    ("num_key_value_heads", 1, "shape"),
    ("head_dim", 8, "shape"),
    ("hidden_act", "gelu", "shape"),
    ("rms_norm_eps", 1e-3, "shape"),
    ("rope_parameters", {"rope_theta": 5.0}, "shape"),
    ("attention_bias", True, "shape"),
    ("mlp_bias", True, "shape"),
    ("max_position_embeddings", 99, "shape"),
    ("layer_types", ["full_attention", "full_attention"], "shape"),
    ("sliding_window", 5, "shape"),
    ("add_swa_attention_sink_bias", True, "shape"),
    ("dflash_config.mask_token_id", 7, "mask_token_id"),
    ("dflash_config.target_layer_ids", [0, 1], "aux_layer_ids"),
    ("dflash_config.block_size", 7, "block_size"),
    ("dflash_config.causal", True, "is_causal"),
    ("dflash_config.swa_window_size", 5, "shape"),
    ("dflash_config.attention_sink_bias", True, "shape"),
    ("dflash_config.attention_value_scale", 0.5, "shape"),
    ("dflash_config.input_embedding_scale", 2.0, "embedding_scale"),
    ("dflash_config.use_aux_hidden_state", False, "aux_layer_ids"),
    ("xpress_rank", 3, "rank"),
    ("xpress_mlp_hidden", 5, "mlp_size"),
    ("xpress_block_size", 4, "block_size of the mixer"),
    ("xpress_num_passes", 2, "num_passes"),
    ("xpress_topc", 9, "num_candidates"),
]


def facts(config: dict[str, Any]) -> dict[str, Any]:
    backbone, refiner = read_xpress(ConfigForm.of(config | {"draft_vocab_size": None}))
    mixer = {"block_size of the mixer": refiner.block_size}
    return {**vars(refiner), **mixer, **vars(backbone), **vars(read(config))}


@pytest.mark.parametrize(("key", "value", "attribute"), ROUND_TRIP, ids=[k for k, *_ in ROUND_TRIP])
def test_every_key_reaches_the_drafter(key: str, value: Any, attribute: str) -> None:
    config = hf() | {"xpress_block_size": 5}
    changed = copy.deepcopy(config)
    *path, name = key.split(".")
    place = changed
    for part in path:
        place = place[part]
    place[name] = value
    before, after = facts(config), facts(changed)
    assert before[attribute] != after[attribute]


def test_a_mixer_without_a_size_has_a_row_more_than_its_drafts() -> None:
    config = hf(draft_vocab_size=None, num_speculative_steps=2)
    assert read_xpress(ConfigForm.of(config)).refiner.block_size == 3
    assert read_xpress(ConfigForm.of(config | {"xpress_block_size": 4})).refiner.block_size == 4
    del config["num_speculative_steps"]
    assert read_xpress(ConfigForm.of(config)).refiner.block_size == read(config).block_size


QWEN3_8B = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_config_as_drafters_of_qwen3_have_it_is_read_whole() -> None:
    form = ConfigForm.of(QWEN3_8B)
    config = read_fill_in(form)
    assert config.aux_layer_ids == (2, 10, 18, 26, 34)
    assert config.is_causal == (False,) * 5
    assert config.shape.sliding_windows == (None,) * 5
    assert (config.block_size, config.num_target_layers, config.mask_token_id) == (16, 36, 151669)
    assert form.top.unread() == []
    assert select(QWEN3_8B).speculative.num_speculative_tokens == 15


def test_the_drafters_own_word_on_sinks_wins_over_that_of_the_family() -> None:
    config = hf({"attention_sink_bias": False}, add_swa_attention_sink_bias=True)
    assert not read(config).shape.has_sinks
    assert read(hf(add_swa_attention_sink_bias=True)).shape.has_sinks


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({}, 1e6),
        ({"rope_theta": 5.0}, 5.0),
        ({"rope_parameters": {"rope_theta": 5.0}}, 5.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, 1e6),
    ],
)
def test_a_config_without_a_theta_has_that_of_qwen3(rope: dict[str, Any], theta: float) -> None:
    config = {key: value for key, value in hf().items() if not key.startswith("rope")}
    rates = read(config | rope).shape.rotary("cpu").inverse_frequencies
    assert rates[1].item() == pytest.approx(theta ** (-2 / config["head_dim"]))


SPECULATORS_KEYS: list[tuple[str, Any, str]] = [
    ("xpress_rank", 3, "rank"),
    ("xpress_mlp_ratio", 3, "mlp_size"),
    ("num_jacobi_passes", 5, "num_passes"),
    ("block_size", 4, "block_size"),
    ("mask_token_id", 1, "mask_token_id"),
    ("aux_hidden_state_layer_ids", [1, 2], "aux_layer_ids"),
    ("target_hidden_size", 32, "target_hidden_size"),
]


@pytest.mark.parametrize(("key", "value", "attribute"), SPECULATORS_KEYS)
def test_every_key_of_the_other_form_reaches_the_drafter(
    key: str, value: Any, attribute: str
) -> None:
    config = config_of("xpress-1", SPECULATORS)
    assert facts(config)[attribute] != facts(config | {key: value})[attribute]


@pytest.mark.parametrize(
    ("case", "form"),
    [("dflash-1", HF), ("dflash-2", SPECULATORS), ("xpress-1", SPECULATORS)],
)
def test_every_key_is_read_and_a_strange_one_is_told(
    case: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(case, tmp_path / "plain", form=form)
    assert "nothing reads" not in caplog.text
    load(case, tmp_path / "strange", lambda tensors, config: config.update(norm_it=1), form)
    assert "keys that nothing reads: norm_it" in caplog.text


WRONG: list[tuple[dict[str, Any], str]] = [
    (hf(is_neox_style=False), "rotates its heads in a layout that is not known"),
    (hf(layer_types=["full_attention"]), "layer types of a config do not describe"),
    (hf(layer_types=["mamba", "mamba"]), "layer types of a config do not describe"),
    (hf(sliding_window=None), "lacks 'sliding_window'"),
    (hf({"sample_from_anchor": True}), "does not sample from the anchor's row"),
    (hf({"block_size": 1}), "has no row for a draft"),
    (hf({"block_size": "five"}), "has a wrong 'block_size'"),
    (hf({"mask_token_id": -1}), "has a wrong 'mask_token_id'"),
    (hf({"attention_value_scale": float("nan")}), "has a wrong 'attention_value_scale'"),
    (hf(hidden_size=None), "lacks 'hidden_size'"),
    (hf() | {"dflash_config": []}, "has a wrong 'dflash_config'"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_fill_in(ConfigForm.of(config))
    speculative = SpeculativeConfig.parse({"method": "dflash", "model": "x"})
    with pytest.raises(CheckpointError, match=message):
        get_registry().select(speculative, config, {})


def select(config: dict[str, Any], **keys: Any) -> Any:
    return get_registry().select(SpeculativeConfig.parse({"model": "x", **keys}), config, {})


@pytest.mark.parametrize(
    ("case", "form", "name"),
    [
        ("dflash-1", SPECULATORS, "dflash"),
        ("dflash-3", HF, "dflash"),
        ("xpress-1", SPECULATORS, "xpress"),
        ("xpress-1", "checkpoint_vllm", "xpress"),
    ],
)
@pytest.mark.parametrize("keys", [{}, {"method": "dflash"}])
def test_the_architecture_selects_the_drafter(
    case: str, form: str, name: str, keys: dict[str, Any]
) -> None:
    config = config_of(case, form)
    selection = select(config, **keys)
    assert (selection.spec.name, selection.speculative.method) == (name, "dflash")
    # A block is filled when nothing is said.
    assert selection.speculative.num_speculative_tokens == 4
    with pytest.raises(ConfigError, match="allowed: 1 to 4"):
        select(config, num_speculative_tokens=5, **keys)


def test_an_architecture_of_another_kind_is_not_served() -> None:
    with pytest.raises(UnknownMethodError, match="for this draft checkpoint"):
        select(hf(architectures=["LlamaForCausalLM"]), method="dflash")


def test_what_is_declared_follows_the_config() -> None:
    spec = select(hf()).spec
    full, reduced = (
        spec.capabilities_for(DraftSetup(config))
        for config in (hf(), config_of("dflash-2", SPECULATORS))
    )
    assert full.layouts == {DraftLogitsLayout.DENSE}
    assert full.draft_vocab_size is None
    assert reduced.layouts == {DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB}
    assert (reduced.draft_vocab_size, reduced.max_num_speculative_tokens) == (96, 5)
    needs = spec.needs_for(DraftSetup(hf()))
    assert needs.aux_layer_ids == (2, 5)
    assert needs.prefill_lookahead == 0
    assert [layer.sliding_window for layer in needs.kv_specs] == [6, None]
    last = spec.needs_for(DraftSetup(hf({"use_aux_hidden_state": False})))
    assert (last.hidden_states, last.aux_layer_ids) == (HiddenStates.POST_NORM, ())
    empty = spec.capabilities_for(DraftSetup())
    assert (empty.draft_vocab_size, empty.max_num_speculative_tokens) == (None, None)


@pytest.mark.parametrize("case", ["dflash-2", "xpress-1"])
def test_planning_brings_no_framework(case: str) -> None:
    source = f"""
import sys
from specreg.config import EngineConfig
from specreg.policy import resolve
print(resolve(EngineConfig.parse({{
    "speculative": {{"model": {str(GoldenCase(case).folder / SPECULATORS)!r}}},
    "vocab_size": 160, "dtype": "bfloat16",
}})).num_speculative_tokens)
print([name for name in ("torch", "transformers", "safetensors") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1] == "[]"
