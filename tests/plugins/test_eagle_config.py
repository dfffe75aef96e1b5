"""What EAGLE configs mean: which plugin reads them, what each key changes, what is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import EAGLE1, EAGLE3, SIZES, save_head
from golden_cases import GoldenCase, Replay
from specreg_eagle.aux_layers import aux_layer_ids
from specreg_eagle.eagle3_config import Eagle3Config

from specreg.capabilities import DraftingStyle, DraftLogitsLayout, HiddenStates
from specreg.config import EngineConfig
from specreg.errors import CheckpointError, ConfigError, UnknownMethodError
from specreg.plugin import DraftSetup
from specreg.registry import Selection, get_registry

SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
    },
    "transformer_layer_config": {"model_type": "llama", **SIZES},
    "draft_vocab_size": 96,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "norm_before_residual": True,
}
PARALLEL = {
    **SPECULATORS,
    "architectures": ["PEagleDraftModel"],
    "speculators_model_type": "peagle",
    "speculators_config": {**SPECULATORS["speculators_config"], "algorithm": "peagle"},
    "mask_token_id": 7,
}
PLAIN = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def named(architecture: str, **keys: Any) -> dict[str, Any]:
    return {**EAGLE3, "architectures": [architecture], **keys}


def select(config: dict[str, Any], **keys: Any) -> Selection:
    keys = {"model": "somewhere", "num_speculative_tokens": 3, **keys}
    speculative = EngineConfig.parse({"speculative": keys}).speculative
    assert speculative is not None
    return get_registry().select(speculative, config, {"num_hidden_layers": 6})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (SPECULATORS, "eagle3"),
        (PARALLEL, "peagle"),
        ({**SPECULATORS, "speculators_config": {}}, "eagle3"),
        ({**PARALLEL, "speculators_config": {}}, "peagle"),
        (named("LlamaForCausalLMEagle3"), "eagle3"),
        (named("Eagle3LlamaForCausalLM"), "eagle3"),
        (named("Eagle3Qwen3ForCausalLM"), "eagle3"),
        (named("PEagleDraftModel", mask_token_id=3), "peagle"),
        (named("PeagleLlamaForCausalLM", pard_token=3), "peagle"),
        (named("LlamaForCausalLMEagle3", ptd_token_id=3), "peagle"),
        ({**EAGLE1, "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "eagle", "model": PLAIN}, "eagle"),
        ({"model_type": "eagle", "method": "eagle3", "model": PLAIN}, "eagle3"),
    ],
)
def test_a_config_says_what_reads_it(config: dict[str, Any], name: str) -> None:
    assert select(config).spec.name == name


def test_a_plain_llama_is_no_eagle_without_the_method() -> None:
    with pytest.raises(UnknownMethodError, match="cannot be detected"):
        select({**PLAIN, "mask_token_id": 3})
    assert select(PLAIN, method="eagle").spec.name == "eagle"
    assert select(PLAIN, method="eagle3").spec.name == "eagle3"


def test_the_method_eagle3_covers_heads_that_draft_in_one_pass() -> None:
    selection = select(PARALLEL, method="eagle3", parallel_drafting=True)
    assert selection.spec.name == "peagle"
    assert selection.capabilities.style is DraftingStyle.PARALLEL
    with pytest.raises(ConfigError, match="drafts in one way only"):
        select(SPECULATORS, method="eagle3", parallel_drafting=True)


def test_the_number_of_drafts_comes_from_the_proposal_method() -> None:
    selection = select(SPECULATORS, num_speculative_tokens=None)
    assert selection.speculative.num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("method", "architecture"),
    [
        ("eagle", "EagleDeepSeekMTPModel"),
        ("eagle", "EagleLlama4ForCausalLM"),
        ("eagle", "EagleCohereForCausalLM"),
        ("eagle", "EagleMiniCPMForCausalLM"),
        ("eagle3", "Eagle3DeepseekV2ForCausalLM"),
        ("eagle3", "Eagle3DeepseekV3ForCausalLM"),
    ],
)
def test_an_architecture_that_cannot_be_run_is_named(method: str, architecture: str) -> None:
    selection = select({**EAGLE1, "architectures": [architecture]})
    assert selection.spec.name == method
    with pytest.raises(CheckpointError, match="of this architecture") as caught:
        selection.spec.needs_for(selection.setup)
    assert architecture in caught.value.got
    assert "allowed: " in caught.value.got


def test_declarations_follow_the_config() -> None:
    eagle3 = select(SPECULATORS)
    assert eagle3.capabilities.draft_vocab_size == 96
    assert eagle3.capabilities.layouts == {DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB}
    needs = eagle3.spec.needs_for(eagle3.setup)
    assert needs.aux_layer_ids == (1, 3, 4)
    assert needs.hidden_states is HiddenStates.NONE
    full = select({**SPECULATORS, "draft_vocab_size": 160})
    assert full.capabilities.draft_vocab_size is None
    assert full.capabilities.layouts == {DraftLogitsLayout.DENSE}
    one = select(PLAIN, method="eagle")
    needs = one.spec.needs_for(one.setup)
    assert (needs.hidden_states, needs.aux_layer_ids) == (HiddenStates.POST_NORM, ())
    assert [(s.num_kv_heads, s.head_dim) for s in needs.kv_specs] == [(2, 16)]
    for name in ("eagle", "eagle3", "peagle"):
        (spec,) = (e.spec for e in get_registry().speculators if e.spec.name == name)
        assert spec.capabilities_for(DraftSetup()).is_cuda_graph_safe
        assert spec.needs_for(DraftSetup()).prefill_lookahead == 1


IDS = "eagle_aux_hidden_state_layer_ids"
BARE = {key: value for key, value in EAGLE3.items() if key != IDS}


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({IDS: [4, 1, 3]}, (1, 3, 4)),
        ({"eagle_config": {IDS: [1, 2, 5]}}, (1, 2, 5)),
        ({"dflash_config": {"target_layer_ids": [0, 1, 5]}}, (1, 2, 6)),
        ({"dspark_target_layer_ids": [0, 1, 4]}, (1, 2, 5)),
        ({"target_layer_ids": [0, 1, 4]}, (1, 2, 5)),
        ({"dflash_config": {"layer_ids": [0, 1, 4]}}, (0, 1, 4)),
        ({"eagle_config": {"layer_ids": [0, 1, 4]}}, (0, 1, 4)),
        ({IDS: None, "eagle_config": {IDS: [0, 3]}}, (0, 3)),
        ({IDS: [6]}, (6,)),
    ],
)
def test_ids_are_read_from_every_place(keys: dict[str, Any], ids: tuple[int, ...]) -> None:
    config = Eagle3Config.read({**BARE, **keys}, "draft")
    assert aux_layer_ids(config, 6) == ids
    assert config.reader.unread() == []


def test_the_first_place_counts_and_another_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    keys = {IDS: [1, 2, 3], "eagle_config": {IDS: [3, 2, 1], "layer_ids": [1, 2, 4]}}
    config = Eagle3Config.read({**BARE, **keys}, "draft")
    assert aux_layer_ids(config, 6) == (1, 2, 3)
    (record,) = caplog.records
    assert "eagle_config.layer_ids names [1, 2, 4]" in record.getMessage()


@pytest.mark.parametrize(
    ("keys", "num_layers", "message"),
    [
        ({IDS: [1, 3, 3]}, 6, r"\[3\] repeated"),
        ({IDS: [1, 3, 7]}, 6, r"\[7\] beyond; allowed: 0 to 6"),
        ({IDS: [1, 3], "num_aux_hidden_states": 3}, 6, r"2 ids \[1, 3\]; allowed: 3"),
        ({"num_aux_layers": 4}, 30, r"3 ids \[2, 15, 27\] by default; allowed: 4"),
        ({"num_aux_layers": 4, "num_aux_hidden_states": 3}, 30, "two numbers"),
        ({}, 2, r"2 target layers, so \[2, 1, -1\]"),
        ({IDS: [1, "3"]}, 6, "a list of integers"),
    ],
)
def test_ids_that_cannot_be_are_refused(
    keys: dict[str, Any], num_layers: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        aux_layer_ids(Eagle3Config.read({**BARE, **keys}, "draft"), num_layers)


def test_default_ids_follow_the_targets_depth() -> None:
    config = Eagle3Config.read(BARE, "draft")
    assert aux_layer_ids(config, 32) == (2, 16, 29)
    assert aux_layer_ids(config, None) == ()


def loaded(config: dict[str, Any], folder: Path) -> Any:
    """The head of a checkpoint that fits a config."""
    is_eagle3 = config["architectures"] == EAGLE3["architectures"]
    method = "eagle3" if is_eagle3 else "eagle"
    without = () if is_eagle3 else ("lm_head.weight",)
    directory = save_head(folder / "draft", config, without=without)
    case = GoldenCase("eagle3-1" if is_eagle3 else "eagle1-1")
    return Replay(case, {"method": method, "model": str(directory)}, folder).speculator.head


COMMON: list[tuple[dict[str, Any], Any]] = [
    ({"num_hidden_layers": 2}, lambda head: len(head.layers)),
    ({"intermediate_size": 128}, lambda head: head.layers[0].mlp.up_proj.out_features),
    ({"num_attention_heads": 2}, lambda head: head.layers[0].self_attn.q_proj.out_features),
    ({"num_key_value_heads": 4}, lambda head: head.layers[0].self_attn.k_proj.out_features),
    ({"head_dim": 8}, lambda head: head.layers[0].self_attn.q_proj.out_features),
    ({"rms_norm_eps": 1e-3}, lambda head: head.layers[0].post_attention_layernorm.eps),
    ({"rope_theta": 1e4}, lambda head: head.rotary.inverse_frequencies[1].item()),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        lambda head: head.rotary.inverse_frequencies[0].item(),
    ),
    ({"partial_rotary_factor": 0.5}, lambda head: len(head.rotary.inverse_frequencies)),
    ({"hidden_act": "gelu"}, lambda head: head.layers[0].mlp.act),
    ({"mlp_bias": True}, lambda head: head.layers[0].mlp.up_proj.bias is None),
    ({"attention_bias": True}, lambda head: head.layers[0].self_attn.q_proj.bias is None),
    (
        {"layer_types": ["sliding_attention"], "sliding_window": 3},
        lambda head: head.layers[0].self_attn.sliding_window,
    ),
    ({"logit_scale": 0.5}, lambda head: head.score(torch.ones(1, 64)).sum().item()),
]
KEYS: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    *((EAGLE1, keys, attribute) for keys, attribute in COMMON),
    (EAGLE1, {"bias": True}, lambda head: head.fc.bias is None),
    (EAGLE1, {"vocab_size": 170}, lambda head: head.ends.vocab_size),
    *((EAGLE3, keys, attribute) for keys, attribute in COMMON),
    (EAGLE3, {"draft_vocab_size": 95}, lambda head: len(head.ends.target_ids)),
    (EAGLE3, {IDS: [0, 2, 4, 6]}, lambda head: head.fusion.fc.in_features),
    (EAGLE3, {"norm_before_residual": True}, lambda head: head.layers[0].starts_normed),
    (EAGLE3, {"norm_before_fc": True}, lambda head: hasattr(head.fusion.input_norm, "eps")),
    (
        EAGLE3,
        {"eagle_config": {"norm_before_fc": True}},
        lambda head: hasattr(head.fusion.input_norm, "eps"),
    ),
    (EAGLE3, {"fc_norm": True}, lambda head: len(head.fusion.fc_norm)),
    (EAGLE3, {"norm_output": True}, lambda head: head.config.norm_output),
    (
        EAGLE3,
        {IDS: None, "eagle_config": {"use_aux_hidden_state": False}},
        lambda head: isinstance(head.fusion, torch.nn.Identity),
    ),
    (
        EAGLE3,
        {"hidden_size": 32, "target_hidden_size": 64},
        lambda head: head.fusion.fc.out_features,
    ),
]


@pytest.mark.parametrize(
    ("config", "keys", "attribute"),
    KEYS,
    ids=[f"{'eagle' if config is EAGLE1 else 'eagle3'}: {keys}" for config, keys, _ in KEYS],
)
def test_a_key_that_changes_changes_the_head(
    config: dict[str, Any],
    keys: dict[str, Any],
    attribute: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = attribute(loaded(config, tmp_path / "before"))
    assert attribute(loaded({**config, **keys}, tmp_path / "after")) != before
    assert not [r for r in caplog.records if "keys that nothing reads" in r.getMessage()]


def test_the_base_model_may_be_nested(tmp_path: Path) -> None:
    """The same drafts as from the flat form."""
    import json

    case = GoldenCase("eagle1-1")
    directory = case.checkpoint("checkpoint", tmp_path)
    flat = json.loads((directory / "config.json").read_text())
    nested = {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": flat}
    nested["truncated_vocab_size"] = None
    (directory / "config.json").write_text(json.dumps(nested))
    replay = Replay(case, {"model": str(directory)}, tmp_path)
    for index, proposed in replay.rounds():
        assert proposed.tokens == case.tensor(index, "draft_tokens").tolist()
