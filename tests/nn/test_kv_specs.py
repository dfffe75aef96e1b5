"""The attention layers of a decoder, from its config alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoConfig

from specreg.capabilities import KVLayerSpec
from specreg.errors import CheckpointError
from specreg.nn.kv_specs import kv_specs_from_config

BASE = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


def windows(**keys: Any) -> list[int | None]:
    return [spec.sliding_window for spec in kv_specs_from_config({**BASE, **keys})]


def test_the_head_dim_is_the_configs_or_the_quotient() -> None:
    assert kv_specs_from_config(BASE) == (KVLayerSpec(2, 8),) * 6
    assert kv_specs_from_config({**BASE, "head_dim": 16}) == (KVLayerSpec(2, 16),) * 6
    assert kv_specs_from_config({**BASE, "head_dim": None}) == (KVLayerSpec(2, 8),) * 6


def test_without_grouping_every_head_has_keys_of_its_own() -> None:
    config = {"n_layer": 2, "n_head": 4, "n_embd": 32}
    assert kv_specs_from_config(config) == (KVLayerSpec(4, 8),) * 2


@pytest.mark.parametrize(
    ("model_type", "window"), [("gemma4_text", 512), ("gemma4_unified_text", 1024)]
)
def test_gemma_4_has_sizes_that_its_configs_leave_out(model_type: str, window: int) -> None:
    sliding = KVLayerSpec(2, 256, sliding_window=window)
    expected = (sliding,) * 5 + (KVLayerSpec(2, 512),)
    assert kv_specs_from_config({**BASE, "model_type": model_type}) == expected
    config = AutoConfig.for_model(model_type, **BASE)
    assert kv_specs_from_config(config.to_dict()) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window": 5}, [5] * 6),
        ({"sliding_window": None}, [None] * 6),
        ({"sliding_window": 5, "use_sliding_window": False}, [None] * 6),
        (
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 4},
            [None, None, None, None, 5, 5],
        ),
        ({"sliding_window": 5, "model_type": "gemma2"}, [5, None, 5, None, 5, None]),
        ({"sliding_window": 5, "model_type": "gpt_oss"}, [5, None, 5, None, 5, None]),
        ({"sliding_window": 5, "model_type": "gemma3_text"}, [5, 5, 5, 5, 5, None]),
        ({"sliding_window": 5, "sliding_window_pattern": 3}, [5, 5, None, 5, 5, None]),
        (
            {
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
                "sliding_window_pattern": 2,
            },
            [None, 5, None, 5, None, 5],
        ),
    ],
)
def test_windows_follow_the_layer_pattern_that_the_config_implies(
    keys: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(**keys) == expected


def test_a_multimodal_config_describes_its_decoder_in_a_part_of_its_own() -> None:
    config = {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 3}}
    text = {**BASE, "model_type": "gemma3_text", "sliding_window": 5}
    assert kv_specs_from_config({**config, "text_config": text}) == kv_specs_from_config(text)


def test_full_layers_may_have_heads_of_their_own() -> None:
    config = {
        **BASE,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
    }
    assert kv_specs_from_config(config)[:2] == (
        KVLayerSpec(2, 8, sliding_window=5),
        KVLayerSpec(2, 32),
    )
    assert kv_specs_from_config({**config, "attention_k_eq_v": True})[1] == KVLayerSpec(1, 32)
    overrides = {"1": {"head_dim": 12}, "4": {"num_key_value_heads": 4}}
    specs = kv_specs_from_config({**config, "per_layer_config": overrides})
    assert (specs[1], specs[4]) == (KVLayerSpec(2, 12), KVLayerSpec(4, 8, sliding_window=5))


def test_latent_attention_is_counted_over_its_expanded_keys_and_values() -> None:
    latent = {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
    }
    assert kv_specs_from_config({**BASE, **latent})[0] == KVLayerSpec(8, 16, value_head_dim=12)


def test_a_number_that_is_not_there_is_named() -> None:
    config = {key: value for key, value in BASE.items() if key != "num_hidden_layers"}
    with pytest.raises(CheckpointError, match=r"'num_hidden_layers'(.|\n)*allowed: one of"):
        kv_specs_from_config(config)


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys; from specreg.nn.kv_specs import kv_specs_from_config; "
        f"kv_specs_from_config({BASE!r}); "
        "assert not {'torch', 'transformers', 'triton'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
