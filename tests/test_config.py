from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specreg.config import EngineConfig, SpeculativeConfig
from specreg.errors import ConfigError, SpecregError
from specreg.speculative_keys import SPECULATIVE_KEYS, KeyUse

# Every key that `vllm serve --speculative-config` takes, in the order of its documentation.
VLLM_KEYS = re.findall(
    r"\w+",
    """
method model num_speculative_tokens num_speculative_tokens_per_batch_size
draft_tensor_parallel_size tensor_parallel_size draft_sample_method rejection_sample_method
synthetic_acceptance_rates synthetic_acceptance_length fly_window_size fly_entropy_threshold
fly_entropy_top_k parallel_drafting enforce_eager max_model_len quantization revision code_revision
moe_backend attention_backend kv_cache_dtype draft_load_config draft_lm_head_quantization
use_local_argmax_reduction use_heterogeneous_vocab disable_padded_drafter_batch
disable_eagle_block_drop disable_lookahead_block_hashes enable_adaptive_verification
index_share_for_mtp_iteration dspark_draft_topk xpress_topc prompt_lookup_min prompt_lookup_max
suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
suffix_decoding_min_token_prob target_model_config target_parallel_config draft_model_config
draft_parallel_config
""",
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
engine_keys = st.sampled_from([*EngineConfig.model_fields, "speculative_config", "max-num-seqs"])
speculative_keys = st.sampled_from(
    [*VLLM_KEYS, *SpeculativeConfig.model_fields, "x", "max-model-len"]
)
speculative_mappings = st.dictionaries(speculative_keys, json_values, max_size=5)
engine_mappings = st.dictionaries(
    engine_keys, json_values | speculative_mappings | st.sampled_from(["auto", "off"]), max_size=5
)


def outcome(parse, data):
    """What `parse` gives, or the error that it raises on purpose; others fail the test."""
    try:
        return parse(data)
    except SpecregError as error:
        return error


@given(st.one_of(json_values, engine_mappings, st.dictionaries(st.integers(), json_values)))
def test_whatever_a_configuration_holds_only_specreg_errors_come_out(data):
    config = outcome(EngineConfig.parse, data)
    if isinstance(config, EngineConfig):
        assert EngineConfig.parse(json.loads(json.dumps(config.model_dump(mode="json")))) == config


@given(st.one_of(speculative_mappings, st.text(), json_values.map(json.dumps)))
def test_whatever_a_speculative_config_holds_only_specreg_errors_come_out(data):
    config = outcome(SpeculativeConfig.parse, data)
    if isinstance(config, SpeculativeConfig):
        assert SpeculativeConfig.parse(config.model_dump()) == config


def test_the_table_of_keys_is_complete():
    assert sorted(SPECULATIVE_KEYS) == sorted(VLLM_KEYS)


@pytest.mark.parametrize("key", VLLM_KEYS)
def test_every_key_of_the_table_may_be_null(key):
    assert SpeculativeConfig.parse({key: None}) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "m"),
        ("model", "dir"),
        ("num_speculative_tokens", 3),
        ("draft_sample_method", "probabilistic"),
        ("rejection_sample_method", "block"),
        ("max_model_len", 100),
        ("draft_tensor_parallel_size", 2),
        ("parallel_drafting", True),
    ],
)
def test_keys_that_are_acted_on_reach_the_configuration(key, value):
    assert getattr(SpeculativeConfig.parse({key: value}), key) == value


def test_a_key_that_states_what_happens_anyway_is_accepted_and_another_value_is_refused():
    rows = {key: row for key, row in SPECULATIVE_KEYS.items() if row.use is KeyUse.ACCEPTED}
    checked = [key for key, row in rows.items() if row.accepts]
    assert checked
    for key in checked:
        for value in rows[key].accepts:
            assert SpeculativeConfig.parse({key: value}) == SpeculativeConfig()
            with pytest.raises(ConfigError, match=f"{key}[\\s\\S]*{rows[key].reason}"):
                SpeculativeConfig.parse({key: f"not {value}"})


def test_a_number_is_not_the_boolean_that_it_equals():
    with pytest.raises(ConfigError, match=r"got: +0; allowed: null, False"):
        SpeculativeConfig.parse({"use_local_argmax_reduction": 0})


def test_every_refused_key_says_why():
    refused = [key for key, row in SPECULATIVE_KEYS.items() if row.use is KeyUse.REFUSED]
    assert "quantization" in refused
    for key in refused:
        with pytest.raises(ConfigError, match=f"{key}[\\s\\S]*{SPECULATIVE_KEYS[key].reason}"):
            SpeculativeConfig.parse({key: "x"})


def test_a_lossy_verification_method_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="changes the target's distribution"):
        SpeculativeConfig.parse({"rejection_sample_method": "fly"})


def test_keys_that_the_core_does_not_know_are_kept_for_the_speculator():
    config = SpeculativeConfig.parse(
        {"prompt_lookup_max": 4, "depth-limit": 2, "options": {"width": 3}}
    )
    assert config.options == {"prompt_lookup_max": 4, "depth_limit": 2, "width": 3}


def test_dashes_in_keys_are_underscores_and_a_key_may_come_in_one_spelling_only():
    assert SpeculativeConfig.parse({"num-speculative-tokens": 2}).num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="given twice"):
        SpeculativeConfig.parse({"num-speculative-tokens": 2, "num_speculative_tokens": 2})


def test_json_text_is_parsed_and_other_text_is_refused():
    text = '{"speculative-config": "{\\"method\\": \\"m\\"}"}'
    config = EngineConfig.parse(text)
    assert config.speculative == SpeculativeConfig(method="m")
    for broken in ("{", "[" * 100_000):
        with pytest.raises(ConfigError, match="not JSON"):
            SpeculativeConfig.parse(broken)


@pytest.mark.parametrize("data", [3, [1], "4", '["method"]'])
def test_something_that_is_no_mapping_is_refused(data):
    with pytest.raises(ConfigError, match="not a mapping"):
        EngineConfig.parse(data)


def test_a_key_that_is_no_string_is_refused():
    with pytest.raises(ConfigError, match="is no string"):
        EngineConfig.parse({1: 2})


def test_an_unknown_engine_key_gets_the_nearest_spelling():
    with pytest.raises(ConfigError, match="did you mean 'tensor_parallel_size'"):
        EngineConfig.parse({"tensor_paralel_size": 2})


def test_two_names_of_the_speculative_part_together_are_refused():
    with pytest.raises(ConfigError, match="both 'speculative' and 'speculative_config'"):
        EngineConfig.parse({"speculative": {}, "speculative_config": {}})


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"max_num_seqs": 0}, "config.max_num_seqs"),
        ({"max_num_seqs": True}, "config.max_num_seqs"),
        ({"max_num_seqs": "8"}, "config.max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "config.gpu_memory_utilization"),
        ({"memory_budget_gib": float("nan")}, "config.memory_budget_gib"),
        ({"draft_logits_sharding": "always"}, "config.draft_logits_sharding"),
        ({"speculative": {"num_speculative_tokens": 0}}, "speculative_config.num_speculative_"),
        ({"speculative": {"options": 3}}, "speculative_config.options"),
    ],
)
def test_a_wrong_value_names_its_field_and_what_it_got(data, field):
    with pytest.raises(ConfigError, match=f"where: {field}"):
        EngineConfig.parse(data)


def test_constructing_a_configuration_fails_in_the_same_way_as_parsing_it():
    with pytest.raises(ConfigError, match=r"where: config\.max_num_seqs"):
        EngineConfig(max_num_seqs=0)


def test_a_dtype_has_one_name_and_its_usual_aliases():
    assert EngineConfig(dtype="half").dtype == "float16"
    assert EngineConfig(dtype="float").dtype == "float32"
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        EngineConfig(dtype="bf16")


def test_the_drafter_cannot_have_its_own_tensor_parallel_size():
    speculative = {"draft_tensor_parallel_size": 2}
    EngineConfig.parse({"speculative": speculative, "tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="allowed: null or tensor_parallel_size = 4"):
        EngineConfig.parse({"speculative": speculative, "tensor_parallel_size": 4})


def test_the_drafter_cannot_outlast_the_run():
    with pytest.raises(ConfigError, match="allowed: at most max_model_len = 10"):
        EngineConfig.parse({"speculative": {"max_model_len": 11}, "max_model_len": 10})


def test_cuda_graphs_are_for_batches_that_can_occur():
    config = EngineConfig.parse({"cuda_graph_sizes": [1, 8], "enforce_eager": True})
    assert config.cuda_graph_sizes == (1, 8)
    with pytest.raises(ConfigError, match="allowed: at most max_num_seqs = 4"):
        EngineConfig.parse({"cuda_graph_sizes": [2, 8], "max_num_seqs": 4})
    with pytest.raises(ConfigError, match="cuda_graph_sizes"):
        EngineConfig.parse({"cuda_graph_sizes": [0]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rejection_sample_method": "standard", "synthetic_acceptance_length": 2.0},
            "allowed: 's",
        ),
        ({}, "exactly one of the two"),
        ({"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2.0}, "exactly one"),
        ({"synthetic_acceptance_rates": [0.1, 0.2, 0.3]}, "do not increase"),
        ({"synthetic_acceptance_rates": [0.5]}, "num_speculative_tokens = 3"),
        ({"synthetic_acceptance_rates": []}, "0 rates"),
        ({"synthetic_acceptance_length": 4.5}, r"1 to num_speculative_tokens \+ 1 = 4"),
    ],
)
def test_synthetic_acceptance_that_makes_no_sense_is_refused(changes, message):
    base = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(base | changes)


def test_synthetic_acceptance_is_given_as_rates_or_as_a_length():
    base = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2}
    rates = SpeculativeConfig.parse(base | {"synthetic_acceptance_rates": [0.9, 0.5]})
    assert rates.synthetic_acceptance_rates == (0.9, 0.5)
    length = SpeculativeConfig.parse(base | {"synthetic_acceptance_length": 3})
    assert length.synthetic_acceptance_length == 3


FILES = {
    "run.yaml": "max_num_seqs: 4\nspeculative-config:\n  method: m\n",
    "run.yml": "max-num-seqs: 4\nspeculative: {method: m}\n",
    "run.toml": 'max_num_seqs = 4\n[speculative_config]\nmethod = "m"\n',
    "run.json": '{"max_num_seqs": 4, "speculative": {"method": "m"}}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_is_the_same_in_every_file_format(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name])
    config = EngineConfig.load(path)
    assert config == EngineConfig(max_num_seqs=4, speculative=SpeculativeConfig(method="m"))


def test_overrides_replace_what_a_file_says_and_none_leaves_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILES["run.yaml"])
    config = EngineConfig.load(
        path, {"speculative_config": '{"method": "n"}', "max_num_seqs": None, "dtype": "half"}
    )
    assert config.speculative == SpeculativeConfig(method="n")
    assert (config.max_num_seqs, config.dtype) == (4, "float16")


def test_an_empty_file_is_the_default_configuration(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert EngineConfig.load(path) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "a: [1"),
        ("run.yaml", "when: 2020-99-99"),
        ("run.toml", "a = "),
        ("run.json", "{"),
        ("run.json", "\udcff"),
        ("absent.yaml", None),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=rf"cannot be read[\s\S]*{name}"):
        EngineConfig.load(path)


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"allowed: \.yaml, \.yml, \.toml, \.json"):
        EngineConfig.load(tmp_path / "run.ini")
