"""Loading Gemma 4 assistants: what is consumed, what is refused, and in which words."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gemma4_host import load_gemma4
from safetensors.torch import load_file, save_file
from specreg_mtp.gemma4_config import AssistantConfig, Centroids
from specreg_mtp.gemma4_random import random_drafter, save_random_assistant
from torch import Tensor

from specreg.config import EngineConfig
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError, ConfigError, UnknownMethodError
from specreg.registry import get_registry
from specreg.specs import DraftSetup
from specreg.weights import module_bytes

VOCAB_SIZE, HIDDEN_SIZE = 101, 32
TARGET_CONFIG: Mapping[str, Any] = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "sliding_window": 7,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def fake_target(dtype: torch.dtype = torch.float32, **text: Any) -> Any:
    """What loading asks of a target."""
    config = {**TARGET_CONFIG, "text_config": {**TARGET_CONFIG["text_config"], **text}}
    return SimpleNamespace(
        config=config,
        vocab_size=config["text_config"]["vocab_size"],
        hidden_size=config["text_config"]["hidden_size"],
        num_layers=config["text_config"]["num_hidden_layers"],
        dtype=dtype,
        device=torch.device("cpu"),
    )


Weights, Config = dict[str, Tensor], dict[str, Any]
Change = Callable[[Weights, Config], object]


def changed(directory: Path, change: Change, **options: Any) -> Path:
    """A random assistant with a change."""
    save_random_assistant(directory, TARGET_CONFIG, **options)
    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    change(weights, config)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text(**keys: Any) -> Change:
    return lambda weights, config: config["text_config"].update(keys)


def top(**keys: Any) -> Change:
    return lambda weights, config: config.update(keys)


def without(name: str) -> Change:
    return lambda weights, config: weights.pop(name)


def with_tensor(name: str, tensor: Tensor) -> Change:
    return lambda weights, config: weights.update({name: tensor.clone()})


def untied(weights: Weights, config: Config) -> None:
    config["tie_word_embeddings"] = False
    weights[HEAD] = weights[EMBEDDING] + 1


def test_every_tensor_is_loaded_and_nothing_else_takes_memory(tmp_path: Path) -> None:
    path = save_random_assistant(tmp_path, TARGET_CONFIG, num_centroids=101, top_k=5)
    speculator = load_gemma4(path, fake_target())
    weights = load_file(path / "model.safetensors")
    assert speculator.assistant is not None
    state = speculator.assistant.state_dict()
    weights[HEAD] = weights.pop(EMBEDDING)
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert speculator.weight_bytes() == sum(weight.nbytes for weight in weights.values())
    assert speculator.weight_bytes() == module_bytes(speculator.assistant)


LOADS: Mapping[str, Change] = {
    "as it is": lambda weights, config: None,
    "an untied head beside the embedding": untied,
    "an untied head alone": lambda w, c: (untied(w, c), w.pop(EMBEDDING)),
    "a tied head that is stored as well": with_tensor(HEAD, torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)),
    "keys and values of its own": with_tensor(
        "model.layers.0.self_attn.k_proj.weight", torch.zeros(16, HIDDEN_SIZE)
    ),
    "a head in fp16": lambda w, c: w.update({EMBEDDING: w[EMBEDDING].half()}),
    "no rotary parameters": lambda w, c: c["text_config"].pop("rope_parameters"),
    "no layer types": lambda w, c: (
        c["text_config"].pop("layer_types"),
        c["text_config"].update(num_hidden_layers=1, num_kv_shared_layers=1, head_dim=16),
        [w.pop(name) for name in list(w) if "layers.0." in name],
        [w.update({n.replace(".1.", ".0."): w.pop(n)}) for n in list(w) if "layers.1." in n],
    ),
}


@pytest.mark.parametrize("case", LOADS)
def test_a_complete_checkpoint_loads_in_the_runs_dtype(tmp_path: Path, case: str) -> None:
    path = changed(tmp_path, LOADS[case])
    speculator = load_gemma4(path, fake_target(torch.bfloat16))
    assert speculator.assistant is not None
    state = speculator.assistant.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert not any(tensor.is_meta for tensor in state.values())
    weights = load_file(path / "model.safetensors")
    is_untied = case.startswith("an untied")
    assert torch.equal(state[HEAD], weights[HEAD if is_untied else EMBEDDING].bfloat16())


REFUSED: Mapping[str, tuple[Change, str]] = {
    "no head": (
        without(EMBEDDING),
        r"does not fill every parameter.*model\.embed_tokens\.weight \[101, 32\]",
    ),
    "no untied head": (
        top(tie_word_embeddings=False),
        r"does not fill every parameter.*lm_head\.weight \[101, 32\]",
    ),
    "a missing projection": (without(Q_PROJ), r"1 without a tensor: model\.layers\.1\.self_attn"),
    "a missing scalar": (without("model.layers.0.layer_scalar"), r"layer_scalar \[1\]"),
    "a misshapen projection": (
        with_tensor(Q_PROJ, torch.zeros(7, HIDDEN_SIZE)),
        r"'model\.layers\.1\.self_attn\.q_proj\.weight' \[7, 32\]; allowed: \[64, 32\]",
    ),
    "a tensor that nothing reads": (
        with_tensor("model.layers.0.mlp.gate_proj.weight_scale", torch.ones(1)),
        r"no place in the drafter.*gate_proj\.weight_scale",
    ),
    "a quantised head": (
        with_tensor(EMBEDDING, torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.int8)),
        r"is quantised.*'model\.embed_tokens\.weight' in torch\.int8",
    ),
    "another target's hidden size": (
        top(backbone_hidden_size=48),
        "another hidden size.*'backbone_hidden_size'.*48; allowed: the target's 32",
    ),
    "another hidden size in the config": (text(hidden_size=16), "another shape than its config"),
    "another head size": (text(head_dim=16), "4 heads of 16.*a multiple of 2 heads of 8"),
    "per-layer inputs": (
        text(hidden_size_per_layer_input=4),
        "'hidden_size_per_layer_input'.*4; allowed: 0",
    ),
    "a table of per-layer inputs": (
        text(vocab_size_per_layer_input=101),
        "'vocab_size_per_layer_input'.*101; allowed: 0",
    ),
    "experts": (text(enable_moe_block=True), "'enable_moe_block'.*True; allowed: False"),
    "double-wide layers": (
        text(use_double_wide_mlp=True),
        "'use_double_wide_mlp'.*True; allowed: False",
    ),
    "layers with keys of their own": (
        text(num_kv_shared_layers=1),
        "'num_kv_shared_layers'.*1; allowed: 0 or 2",
    ),
    "attention in both directions": (
        text(use_bidirectional_attention="all"),
        "'use_bidirectional_attention'.*'all'; allowed: None or 'vision'",
    ),
    "too few layer types": (text(layer_types=["full_attention"]), "do not describe its layers"),
    "an unknown layer type": (
        text(layer_types=["linear_attention", "full_attention"]),
        "do not describe its layers.*linear_attention",
    ),
    "one rotary embedding for all": (
        text(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "not told by layer type",
    ),
    "heads of two sizes in one type": (
        text(
            layer_types=["full_attention", "full_attention"],
            per_layer_config={"0": {"head_dim": 8}, "1": {"head_dim": 16}},
        ),
        r"heads of several sizes.*\[8, 16\]; allowed: one size",
    ),
    "a layer with a window of its own": (
        text(per_layer_config={"0": {"sliding_window": 8}, "1": {"head_dim": 16}}),
        "differs from the others.*sliding_window; allowed: head_dim",
    ),
    "no number": (text(hidden_size="32"), "wrong 'hidden_size'.*'32'; allowed: an integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_faulty_checkpoint_is_refused_in_words_that_name_the_fault(
    tmp_path: Path, case: str
) -> None:
    change, message = REFUSED[case]
    path = changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_gemma4(path, fake_target())


ORDERED_REFUSED: Mapping[str, tuple[Change, str]] = {
    "no centroids": (
        without("masked_embedding.centroids.weight"),
        r"masked_embedding\.centroids\.weight \[101, 32\]",
    ),
    "no ordering": (
        without("masked_embedding.token_ordering"),
        r"masked_embedding\.token_ordering \[101\]",
    ),
    "an ordering that repeats": (
        with_tensor("masked_embedding.token_ordering", torch.zeros(VOCAB_SIZE, dtype=torch.int64)),
        r"does not name every token once.*1 different ids; allowed: each of 0 \.\. 100 once",
    ),
    "an ordering in floats": (
        with_tensor("masked_embedding.token_ordering", torch.arange(float(VOCAB_SIZE))),
        r"no integers where ids belong.*token_ordering' in torch\.float32",
    ),
    "centroids that do not divide": (
        top(num_centroids=10),
        "10 and 5 for a vocabulary of 101; allowed: a divisor",
    ),
    "more than there are": (
        top(centroid_intermediate_top_k=102),
        "101 and 102 for a vocabulary of 101",
    ),
    "a dense head with centroids": (
        top(use_ordered_embeddings=False),
        r"no place in the drafter.*masked_embedding\.centroids\.weight",
    ),
}


@pytest.mark.parametrize("case", ORDERED_REFUSED)
def test_a_faulty_ordered_head_is_refused(tmp_path: Path, case: str) -> None:
    change, message = ORDERED_REFUSED[case]
    path = changed(tmp_path, change, num_centroids=101, top_k=5)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_gemma4(path, fake_target())


UNFIT: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another hidden size": (
        {"hidden_size": 48},
        "another hidden size.*backbone_hidden_size.*32; allowed: the target's 48",
    ),
    "another vocabulary": (
        {"vocab_size": 202},
        "another vocabulary.*text_config.vocab_size.*101; allowed: the target's 202",
    ),
    "no full layer with keys of its own": (
        {"num_kv_shared_layers": 5},
        "layer type 'full_attention'.*sliding_attention in the target",
    ),
    "no sliding layer": (
        {"layer_types": ["full_attention"] * 6},
        "layer type 'sliding_attention'.*full_attention in the target",
    ),
    "heads of another size": (
        {"head_dim": 12},
        "sliding_attention layers; layer 3 of the target.*heads of 8 with a window of 7; allowed: "
        "a multiple of 2 heads of 12",
    ),
    "global heads of another size": (
        {"global_head_dim": 32},
        "full_attention layers; layer 1 of the target.*heads of 16; allowed: a multiple of 1 heads "
        "of 32",
    ),
    "a number of heads that does not divide": (
        {"num_key_value_heads": 3},
        "4 heads of 8.*allowed: a multiple of 3 heads of 8",
    ),
    "a narrower window": (
        {"sliding_window": 6},
        "a window of 7; allowed.*with a window of at most 6",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_target_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    changes, message = UNFIT[case]
    path = save_random_assistant(tmp_path, TARGET_CONFIG)
    target = fake_target(**changes)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_gemma4(path, target)


def test_what_the_target_lacks_is_told_before_any_weight_is_read(tmp_path: Path) -> None:
    config = json.loads(
        (save_random_assistant(tmp_path, TARGET_CONFIG) / "config.json").read_text()
    )
    spec = next(e.spec for e in get_registry().speculators if e.spec.name == "gemma4")
    needs = spec.needs_for(DraftSetup(config, TARGET_CONFIG))
    assert needs.target_kv_layers == (1, 3)
    assert spec.needs_for(DraftSetup()).target_kv_layers == ()
    assert spec.needs_for(DraftSetup(config)).target_kv_layers == ()
    with pytest.raises(CheckpointError, match="layer type 'sliding_attention'"):
        spec.needs_for(DraftSetup(config, fake_target(layer_types=["full_attention"] * 6).config))


@pytest.mark.parametrize("ids", ["[3, 101]", "[-1]", '"3"'])
def test_suppressed_tokens_must_exist(tmp_path: Path, ids: str) -> None:
    path = save_random_assistant(tmp_path, TARGET_CONFIG)
    (path / "generation_config.json").write_text(f'{{"suppress_tokens": {ids}}}')
    with pytest.raises(CheckpointError, match="suppress_tokens"):
        load_gemma4(path, fake_target())


SECTION = "text_config"
# (object, key, value) -> the attributes that become another.
KEYS: Mapping[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("", "backbone_hidden_size"): (48, {"backbone_size": 48}),
    ("", "tie_word_embeddings"): (False, {"is_tied": False}),
    ("", "use_ordered_embeddings"): (True, {"centroids": Centroids(101, 1)}),
    (SECTION, "hidden_size"): (24, {"hidden_size": 24}),
    (SECTION, "intermediate_size"): (24, {"intermediate_size": 24}),
    (SECTION, "vocab_size"): (202, {"vocab_size": 202}),
    (SECTION, "num_attention_heads"): (8, {"num_heads": 8}),
    (SECTION, "layer_types"): (
        ["full_attention"] * 2,
        {"layer_types": ("full_attention",) * 2},
    ),
    (SECTION, "head_dim"): (12, {"head_dims": {"sliding_attention": 12, "full_attention": 16}}),
    (SECTION, "global_head_dim"): (
        12,
        {"head_dims": {"sliding_attention": 8, "full_attention": 12}},
    ),
    (SECTION, "per_layer_config"): (
        {"1": {"head_dim": 20}},
        {"head_dims": {"sliding_attention": 8, "full_attention": 20}},
    ),
    (SECTION, "sliding_window"): (5, {"sliding_window": 5}),
    (SECTION, "rope_parameters"): (
        {
            "sliding_attention": {"rope_theta": 5.0},
            "full_attention": {"partial_rotary_factor": 0.5},
        },
        {
            "ropes": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e6,
                },
            }
        },
    ),
    (SECTION, "rms_norm_eps"): (1e-3, {"eps": 1e-3}),
    (SECTION, "hidden_activation"): ("silu", {"act": "silu"}),
    (SECTION, "attention_bias"): (True, {"attention_bias": True}),
    (SECTION, "attn_logit_softcapping"): (2.0, {"attention_soft_cap": 2.0}),
    (SECTION, "final_logit_softcapping"): (3.0, {"logits_soft_cap": 3.0}),
}


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_each_config_key_changes_what_is_loaded(tmp_path: Path, section: str, key: str) -> None:
    config = json.loads(
        (save_random_assistant(tmp_path, TARGET_CONFIG) / "config.json").read_text()
    )
    before = AssistantConfig.read(ConfigReader(config, "config.json"))
    value, expected = KEYS[section, key]
    (config[section] if section else config)[key] = value
    after = AssistantConfig.read(ConfigReader(config, "config.json"))
    assert {name: getattr(after, name) for name in expected} == expected
    assert all(getattr(before, name) != wanted for name, wanted in expected.items())


def test_centroids_are_read_where_they_are_used(tmp_path: Path) -> None:
    change = top(num_centroids=101, centroid_intermediate_top_k=7)
    path = changed(tmp_path, change, num_centroids=101, top_k=5)
    speculator = load_gemma4(path, fake_target())
    assert speculator.assistant is not None
    assert speculator.assistant.config.centroids == Centroids(101, 7)


def test_config_keys_that_nothing_reads_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path, lambda w, c: (top(stray=1)(w, c), text(astray=2)(w, c)))
    with caplog.at_level(logging.WARNING):
        load_gemma4(path, fake_target())
    assert "keys that nothing reads: stray, text_config.astray" in caplog.text


@pytest.mark.parametrize(
    ("kind", "backbone_size", "window"), [("", 1536, 512), ("Unified", 3840, 1024)]
)
def test_a_config_as_transformers_writes_it_leaves_nothing_unread(
    tmp_path: Path, kind: str, backbone_size: int, window: int
) -> None:
    transformers = pytest.importorskip("transformers")
    plain = {} if kind else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text_config = getattr(transformers, f"Gemma4{kind}TextConfig")(num_hidden_layers=4, **plain)
    make = getattr(transformers, f"Gemma4{kind}AssistantConfig")
    make(text_config=text_config).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    reader = ConfigReader(config, "config.json")
    read = AssistantConfig.read(reader)
    assert reader.unread() == []
    sparse = {**config, "text_config": dict(config["text_config"])}
    del sparse["backbone_hidden_size"]
    for key in ("sliding_window", "head_dim", "per_layer_config", "rope_parameters"):
        del sparse["text_config"][key]
    for found in (read, AssistantConfig.read(ConfigReader(sparse, "config.json"))):
        assert found.backbone_size == backbone_size
        assert found.sliding_window == window
        assert dict(found.head_dims) == {"sliding_attention": 256, "full_attention": 512}
        assert dict(found.ropes) == config["text_config"]["rope_parameters"]
        assert found.layer_types == ("sliding_attention",) * 3 + ("full_attention",)


def test_random_assistants_are_for_gemma_4_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)Gemma 4 only.*'llama'; allowed: gemma4_text"):
        random_drafter(tmp_path, {"model_type": "llama"})


@pytest.mark.parametrize("kind", ["text", "unified_text"])
def test_a_random_assistant_is_selected_by_method_or_by_nothing(tmp_path: Path, kind: str) -> None:
    target = fake_target(model_type=f"gemma4_{kind}")
    speculative = random_drafter(tmp_path, target.config)
    load_gemma4(tmp_path, target)
    draft_config = json.loads((tmp_path / "config.json").read_text())
    for method in ("mtp", "gemma4_mtp", None):
        config = EngineConfig.parse({"speculative": {**speculative, "method": method}})
        assert config.speculative is not None
        selection = get_registry().select(config.speculative, draft_config, target.config)
        assert selection.spec.name == "gemma4"


def test_the_method_of_its_own_serves_no_other_checkpoint() -> None:
    config = EngineConfig.parse(
        {"speculative": {"method": "gemma4_mtp", "model": "draft", "num_speculative_tokens": 2}}
    )
    assert config.speculative is not None
    with pytest.raises(UnknownMethodError, match="for this draft checkpoint"):
        get_registry().select(config.speculative, {"model_type": "llama"})
