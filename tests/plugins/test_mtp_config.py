"""Keys of the configs of MTP checkpoints, and what they select."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_changes import SPECULATORS, Config, Weights, changed, logits_of, set_keys
from mtp_families import FAMILIES, SIZES, TinyFamily
from mtp_harness import Harness
from specreg_mtp.conventions import CONVENTIONS, METHODS
from specreg_mtp.conventions import FAMILIES as TABLE

from specreg.config import SpeculativeConfig
from specreg.errors import CheckpointError, SpecregError, UnknownMethodError
from specreg.registry import get_registry


def attention(harness: Harness) -> Any:
    return harness.speculator.drafter.steps[0].layer.self_attn


def frequencies(harness: Harness) -> list[float]:
    found: list[float] = harness.speculator.drafter.steps[0].rotary.inverse_frequencies.tolist()
    return found


# key -> another value, and what of the loaded drafter shows it.
KEYS: dict[str, tuple[str, Any, Callable[[Harness], Any]]] = {
    "hidden_act": ("glm", "relu", lambda h: h.speculator.drafter.steps[0].layer.mlp.act),
    "rms_norm_eps": ("glm", 1e-3, lambda h: h.speculator.drafter.steps[1].final_norm.eps),
    "rope_theta": ("glm", 77.0, frequencies),
    "partial_rotary_factor": ("glm", 1.0, frequencies),
    "rope_scaling": ("glm", {"rope_type": "linear", "factor": 4.0}, frequencies),
    "rope_parameters": (SPECULATORS, {"rope_theta": 3.0}, frequencies),
    "sliding_window": ("mimo_v2", 9, lambda h: attention(h).sliding_window),
    "num_nextn_predict_layers": ("glm", 1, lambda h: len(h.speculator.drafter.steps)),
    "layer_types": ("step", ["full_attention"] * 5, lambda h: attention(h).sliding_window),
    "partial_rotary_factors": ("step", [1.0] * 5, frequencies),
    "yarn_only_types": ("step", ["sliding_attention"], frequencies),
    "model_type": (
        "deepseek",
        "glm4_moe",
        lambda h: h.speculator.drafter.steps[0].convention.feeds_stream,
    ),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_changes_is_seen_in_the_loaded_drafter(key: str, tmp_path: Path) -> None:
    name, value, look = KEYS[key]
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    same = {**scaled, "yarn_only_types": ["full_attention"]} if key == "yarn_only_types" else {}
    before = look(Harness(changed(name, tmp_path / "before", set_keys(**same))))
    after = look(Harness(changed(name, tmp_path / "after", set_keys(**{**same, key: value}))))
    assert before != after


# key -> another value, and the tensor that then does not fit, or is missing.
SHAPING_KEYS: dict[str, tuple[str, Any, str]] = {
    "attention_bias": ("a plain target", True, "self_attn.k_proj.bias"),
    "attn_output_gate": ("qwen3_next", False, "self_attn.q_proj.weight"),
    "head_dim": ("glm", 4, "self_attn.k_norm.weight"),
    "intermediate_size": ("glm", 40, "mlp.down_proj.weight"),
    "mlp_bias": ("glm", True, "mlp.down_proj.bias"),
    "num_attention_groups": ("step", 1, "self_attn.k_proj.weight"),
    "num_attention_heads": ("glm", 8, "self_attn.o_proj.weight"),
    "num_key_value_heads": ("glm", 4, "self_attn.k_proj.bias"),
    "use_bias": ("ernie", True, "mlp.down_proj.bias"),
    "use_head_wise_attn_gate": ("step", False, "self_attn.g_proj.weight"),
    "use_qk_norm": ("glm", False, "self_attn.k_norm.weight"),
}


@pytest.mark.parametrize("key", SHAPING_KEYS)
def test_a_key_that_changes_shapes_is_held_against_the_tensors(key: str, tmp_path: Path) -> None:
    name, value, tensor = SHAPING_KEYS[key]
    change = set_keys(
        **{key: value}, **({"attention_other_setting": None} if name == "step" else {})
    )
    with pytest.raises(CheckpointError, match=tensor):
        Harness(changed(name, tmp_path, change))


def test_the_decoder_of_a_multimodal_config_is_read(tmp_path: Path) -> None:
    def nest(weights: Weights, config: Config) -> None:
        del weights
        text = dict(config)
        config.clear()
        config.update(text_config=text, model_type="qwen3_5", vision_config={"depth": 2})
        text["model_type"], text["mtp_num_hidden_layers"] = "qwen3_5_text", 1

    plain = logits_of(Harness(changed("qwen3_next", tmp_path / "plain")))
    assert torch.equal(logits_of(Harness(changed("qwen3_next", tmp_path / "nested", nest))), plain)


def test_keys_of_a_multimodal_target_about_its_other_layers_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {
        "full_attention_interval": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "n_routed_experts": 8,
        "routed_scaling_factor": 2.5,
    }

    def nest(weights: Weights, config: Config) -> None:
        del weights
        text = {**config, **others, "model_type": "qwen3_5_text"}
        config.clear()
        config.update(model_type="qwen3_5", text_config=text, tie_word_embeddings=True)

    with caplog.at_level(logging.WARNING):
        Harness(changed("qwen3_next", tmp_path, nest))
    assert caplog.messages == []


def test_a_diff_of_a_config_leaves_out_what_is_usual() -> None:
    config = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": {"model_type": "qwen3_next", "hidden_size": 64},
    }
    keys = SpeculativeConfig.parse({"method": "mtp", "model": "m", "num_speculative_tokens": 2})
    selection = get_registry().select(keys, config, {})
    (kv,) = selection.spec.needs_for(selection.setup).kv_specs
    assert (kv.num_kv_heads, kv.head_dim) == (2, 256)


def test_keys_that_nothing_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Harness(changed("glm", tmp_path, set_keys(norm_before_stray=True)))
    assert "keys that nothing reads: norm_before_stray" in caplog.text


@pytest.mark.parametrize("method", METHODS)
def test_every_alias_selects_modules(method: str) -> None:
    keys = {"method": method, "model": "draft", "num_speculative_tokens": 2}
    config = {**SIZES, "model_type": "qwen3_next"}
    selection = get_registry().select(SpeculativeConfig.parse(keys), config, {})
    assert selection.spec.name == "mtp"
    assert selection.speculative.method == method


@pytest.mark.parametrize("name", [SPECULATORS, "glm", "mimo", "step"])
def test_a_config_with_modules_needs_no_method(name: str) -> None:
    family: TinyFamily = FAMILIES[name]
    config = {**family.full_config(), "num_nextn_predict_layers": 1}
    keys = {"model": "draft", "num_speculative_tokens": 1}
    selection = get_registry().select(SpeculativeConfig.parse(keys), config, {})
    assert selection.spec.name == "mtp"


def test_a_config_without_modules_is_not_taken_for_one() -> None:
    keys = {"model": "draft", "num_speculative_tokens": 1}
    with pytest.raises(UnknownMethodError, match="cannot be detected"):
        get_registry().select(SpeculativeConfig.parse(keys), {**SIZES, "model_type": "llama"}, {})


def test_a_config_of_nonsense_is_an_error_of_ours() -> None:
    keys = SpeculativeConfig.parse({"method": "mtp", "model": "m", "num_speculative_tokens": 1})
    for config in (
        {"model_type": 3},
        {"num_nextn_predict_layers": "three"},
        {"text_config": [], "architectures": "MiMoForCausalLM"},
        {**SIZES, "num_attention_heads": 0},
    ):
        selection = get_registry().select(keys, config, {})
        with pytest.raises(SpecregError):
            selection.spec.needs_for(selection.setup)


def test_the_table_is_consistent() -> None:
    for family in TABLE.values():
        assert CONVENTIONS[family.convention.name] is family.convention
    for convention in CONVENTIONS.values():
        assert {"layer", "projection", "embedding_norm", "hidden_norm"} <= convention.names.keys()
