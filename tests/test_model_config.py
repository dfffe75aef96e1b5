from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_plugins import ToyPlugin, spec

from specreg.config import SpeculativeConfig
from specreg.errors import CheckpointError, SpecregError
from specreg.known_models import KNOWN_MODELS
from specreg.memory import kv_bytes_per_token
from specreg.model_config import dtype_of, read_model_config, text_config_of, vocab_size_of
from specreg.registry import Registry


@pytest.mark.parametrize("model", [None, "", "nowhere/at-all", "x" * 5000, "nul\0byte"])
def test_a_name_that_says_nothing_here_has_no_config(model):
    assert read_model_config(model) is None


def test_a_directory_without_a_config_has_none(tmp_path):
    assert read_model_config(str(tmp_path)) is None


def test_a_known_model_is_described_before_it_is_fetched():
    for name, known in KNOWN_MODELS.items():
        config = read_model_config(name)
        assert config is known.config
        assert vocab_size_of(config)
        assert dtype_of(config)


@pytest.mark.parametrize("content", ["{", "[1]", "3", "[" * 100_000, b"\xff"])
def test_a_config_that_is_no_json_object_is_named(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(str(tmp_path))


def test_the_text_part_of_a_nested_config_is_found():
    assert text_config_of({"text_config": {"a": 1}, "b": 2}) == {"a": 1}
    assert text_config_of({"transformer_layer_config": {"a": 1}}) == {"a": 1}
    assert text_config_of({"text_config": None, "b": 2})["b"] == 2


@pytest.mark.parametrize("value", [None, 0, -1, "7", 1.5, True])
def test_a_vocabulary_of_no_size_is_unknown(value):
    assert vocab_size_of({"vocab_size": value}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = (
    "text_config vocab_size dtype layer_types num_hidden_layers num_attention_heads hidden_size "
    "num_key_value_heads head_dim architectures model_type speculators_config n_predict"
)


@given(st.dictionaries(st.sampled_from(KEYS.split()), json_values))
def test_a_config_of_any_content_is_read_without_a_crash(config):
    vocab_size_of(config)
    dtype_of(config)
    kv_bytes_per_token(config, "float32")
    registry = Registry.from_plugins([ToyPlugin(spec(architectures=("A",)))])
    for keys in ({"method": "toy"}, {}):
        with contextlib.suppress(SpecregError):
            registry.select(SpeculativeConfig.parse(keys), config)


def test_a_dtype_that_is_no_name_is_unknown():
    assert dtype_of({"dtype": {"weights": "int8"}}) is None
    assert dtype_of({}) is None
