"""Faulty EAGLE checkpoints load, or are refused in words that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, GoldenTarget, Replay
from safetensors.torch import load_file, save_file
from torch import Tensor

from specreg.errors import SpecregError

Tensors = dict[str, Tensor]
METHODS = {"eagle1-1": "eagle", "eagle3-1": "eagle3", "eagle3-2": "eagle3", "peagle-1": "peagle"}


def load(
    name: str,
    folder: Path,
    change: Callable[[Tensors, dict[str, Any]], None] = lambda tensors, config: None,
    form: str = "checkpoint",
    **keys: Any,
) -> Any:
    """The loaded speculator of a case whose checkpoint was changed."""
    case = GoldenCase(name)
    directory = case.checkpoint(form, folder)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    speculative = {"method": METHODS[name], "model": str(directory)}
    return Replay(case, speculative, folder, **keys).speculator


def without(*names: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in names:
            (tensors if name in tensors else config).pop(name)

    return change


def with_(**entries: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    """Tensors and keys that are added or replaced; two underscores stand for a dot."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for key, value in entries.items():
            name = key.replace("__", ".")
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                config[name] = value

    return change


def in_decoder(**entries: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config["transformer_layer_config"].update(entries)


EMBEDDING, HEAD, MAP = "embed_tokens.weight", "lm_head.weight", "d2t"
OFFSETS = torch.arange(96) // 2

LOADS = [
    ("eagle1-1", "no head", with_()),
    ("eagle1-1", "no embedding", without(EMBEDDING)),
    ("eagle1-1", "an own head", with_(lm_head__weight=torch.randn(160, 64))),
    ("eagle1-1", "a head in fp16", with_(lm_head__weight=torch.randn(160, 64).half())),
    ("eagle1-1", "no word of a bias, and none", without("bias")),
    ("eagle3-1", "no head", without(HEAD)),
    ("eagle3-1", "no embedding", without(EMBEDDING)),
    ("eagle3-1", "draft_vocab_size is missing", without("draft_vocab_size")),
    ("eagle3-1", "draft_vocab_size is null", with_(draft_vocab_size=None)),
    ("eagle3-2", "no embedding", without(EMBEDDING)),
    ("eagle3-2", "no t2d", without("t2d")),
    ("eagle3-2", "offsets in int32", with_(d2t=OFFSETS.int())),
    ("peagle-1", "no embedding", without(EMBEDDING)),
    ("peagle-1", "a head in fp16", with_(lm_head__weight=torch.randn(96, 64).half())),
]


@pytest.mark.parametrize(("name", "what", "change"), LOADS, ids=[f"{n}: {w}" for n, w, _ in LOADS])
def test_it_loads(name: str, what: str, change: Any, tmp_path: Path) -> None:
    head = load(name, tmp_path, change, dtype=torch.bfloat16).head
    loaded = [p for p in head.parameters() if not p.is_meta]
    assert loaded
    assert {parameter.dtype for parameter in loaded} == {torch.bfloat16}
    is_meta = {name for name, tensor in head.state_dict().items() if tensor.is_meta}
    assert is_meta <= {"ends.embed_tokens.weight", "ends.lm_head.weight", "ends.d2t"}
    assert head.ends.shares_head == ("ends.lm_head.weight" in is_meta)
    if what == "no head":
        assert head.ends.shares_head
    if what == "no embedding":
        assert head.ends.shares_embedding


class DeepTarget(GoldenTarget):
    """The golden target, as if it had another number of layers."""

    def __init__(self, num_layers: int, key: str = "num_hidden_layers") -> None:
        super().__init__()
        self.num_layers = num_layers
        others = {k: v for k, v in self.config.items() if k != "num_hidden_layers"}
        self.config = {**others, key: num_layers}


REFUSED = [
    (
        "eagle1-1",
        "wider than the target",
        with_(hidden_size=128),
        "another width than the target.*hidden_size 128; allowed: the target's 64",
    ),
    ("eagle1-1", "a bias too few", with_(bias=True), "True, and the file has no fc.bias"),
    ("eagle1-1", "a bias too many", with_(fc__bias=torch.zeros(64)), "the file has an fc.bias"),
    ("eagle1-1", "a bias by word", with_(qkv_bias="no"), "'qkv_bias'(.|\n)*'no'; allowed: true"),
    ("eagle1-1", "no projection", without("fc.weight"), r"fc.weight \[64, 128\]"),
    (
        "eagle1-1",
        "biases of attention that are not there",
        with_(attention_bias=True),
        "True, and the file has no self_attn.q_proj.bias",
    ),
    (
        "eagle1-1",
        "a scale",
        with_(fc__weight_scale=torch.ones(1)),
        r"no place in the drafter.*'fc.weight_scale'.*\[1\]",
    ),
    ("eagle1-1", "a map", with_(d2t=torch.zeros(160, dtype=torch.int64)), "no place.*'d2t'"),
    (
        "eagle1-1",
        "quantised",
        with_(fc__weight=torch.zeros(64, 128, dtype=torch.int8)),
        "quantised.*'fc.weight' in torch.int8",
    ),
    (
        "eagle3-1",
        "quantised head",
        with_(lm_head__weight=torch.zeros(160, 64).to(torch.float8_e4m3fn)),
        "quantised.*'lm_head.weight' in torch.float8_e4m3fn",
    ),
    (
        "eagle3-1",
        "a head of another width",
        with_(lm_head__weight=torch.zeros(160, 32)),
        r"'lm_head.weight' \[160, 32\]; allowed: \[160, 64\]",
    ),
    (
        "eagle3-1",
        "states of another width",
        with_(target_hidden_size=32),
        "target_hidden_size.*32; allowed: the target's 64",
    ),
    ("eagle3-2", "no head", without(HEAD), "no lm_head.weight, 96 columns of width 64"),
    ("eagle3-2", "no map", without(MAP), "no map into the target's.*96 columns"),
    (
        "eagle3-2",
        "a short map",
        with_(d2t=torch.zeros(95, dtype=torch.int64)),
        r"'d2t' \[95\]; allowed: \[96\]",
    ),
    ("eagle3-2", "a map out of range", with_(d2t=OFFSETS + 50), "repeat or lie outside"),
    (
        "eagle3-2",
        "ids where offsets belong",
        with_(d2t=OFFSETS + torch.arange(96)),
        "repeat or lie outside",
    ),
    (
        "eagle3-2",
        "draft_vocab_size is missing",
        without("draft_vocab_size"),
        r"'d2t' \[96\]; allowed: \[160\]",
    ),
    (
        "eagle3-2",
        "larger than the target",
        with_(
            draft_vocab_size=161,
            d2t=torch.zeros(161, dtype=torch.int64),
            lm_head__weight=torch.randn(161, 64),
        ),
        "larger vocabulary than the target.*161; allowed: at most 160",
    ),
    (
        "eagle3-2",
        "four ids and three states",
        with_(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 5]),
        r"fc.weight of 192 inputs, 3 states of 64, for the 4 ids \[1, 2, 3, 5\]",
    ),
    ("eagle3-2", "both norms", with_(fc_norm=True), "exclude each other"),
    ("eagle3-2", "no input norm", without("input_norm.weight"), r"tensor: input_norm.weight \[192"),
    (
        "eagle3-2",
        "an input norm too many",
        with_(norm_before_fc=False),
        r"'input_norm.weight' \(as 'fusion.input_norm.weight'\)",
    ),
    ("eagle3-2", "another family", in_decoder(model_type="gemma3_text"), "'gemma3_text'"),
    ("peagle-1", "no mask state", without("mask_hidden"), r"mask_hidden \[1, 1, 192\]"),
    ("peagle-1", "no mask token", without("mask_token_id"), "no mask token.*None"),
    ("peagle-1", "a mask token too large", with_(mask_token_id=160), "160; allowed: .* below 160"),
]


@pytest.mark.parametrize(
    ("name", "what", "change", "message"), REFUSED, ids=[f"{n}: {w}" for n, w, _, _ in REFUSED]
)
def test_it_is_refused(name: str, what: str, change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecregError, match=f"(?s){message}"):
        load(name, tmp_path, change)


def test_the_files_head_wins_over_the_targets(tmp_path: Path) -> None:
    own = torch.randn(160, 64)
    head = load("eagle1-1", tmp_path, with_(lm_head__weight=own)).head
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(head.score(hidden), hidden @ own.T)


def test_a_bias_that_no_key_mentions_is_used(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        del config["bias"]
        tensors["fc.bias"] = torch.full((64,), 2.0)

    head = load("eagle1-1", tmp_path, change).head
    assert torch.equal(head.fc.bias, torch.full((64,), 2.0))


def test_only_a_drafter_in_parallel_reads_the_state_of_masks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mask = torch.zeros(1, 1, 192)
    load("eagle3-1", tmp_path, with_(mask_hidden=mask), form="checkpoint_research")
    assert "mask_hidden is not read" in caplog.text


def test_an_embedding_that_equals_the_targets_costs_no_memory(tmp_path: Path) -> None:
    shared, own = (load(name, tmp_path).weight_bytes() for name in ("eagle1-1", "eagle3-1"))
    fc, layer = 64 * 128, 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 64
    assert shared == 4 * (fc + layer)
    assert own > shared


def test_keys_that_nothing_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["norm_before_stray"] = True
        config["transformer_layer_config"]["query_scale"] = 2.0

    load("eagle3-1", tmp_path, change)
    (record,) = [r for r in caplog.records if r.name == "specreg.config_reader"]
    assert "norm_before_stray, transformer_layer_config.query_scale" in record.getMessage()


@pytest.mark.parametrize("name", METHODS)
def test_the_recorded_configs_have_no_key_that_is_not_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(name, tmp_path, with_(has_no_defaults_at_init=False))  # published ones have this one, too
    assert caplog.records == []


def test_an_absent_norm_before_residual_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speculator = load("eagle3-1", tmp_path, without("norm_before_residual"))
    assert speculator.head.config.norm_before_residual
    assert "norm_before_residual is absent; True is taken, as vLLM does" in caplog.text
    (tmp_path / "p").mkdir()
    speculator = load("peagle-1", tmp_path / "p", without("norm_before_residual"))
    assert not speculator.head.config.norm_before_residual
    assert "False is taken" in caplog.text


def test_absent_ids_are_the_usual_ones_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = GoldenCase("eagle3-1")
    directory = case.checkpoint("checkpoint", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (directory / "config.json").write_text(json.dumps(config))

    keys = {"method": "eagle3", "model": str(directory)}
    replay = Replay(case, keys, tmp_path, target=DeepTarget(30))
    assert replay.needs.aux_layer_ids == (2, 15, 27)
    told = [r.getMessage() for r in caplog.records if "not stated" in r.getMessage()]
    assert len(told) == 1
    assert "[2, 15, 27]" in told[0]
    with pytest.raises(SpecregError, match=r"6 target layers, so \[2, 3, 3\]"):
        Replay(case, keys, tmp_path, target=DeepTarget(6))
    with pytest.raises(SpecregError, match="depend on a depth that is not known"):
        Replay(case, keys, tmp_path, target=DeepTarget(30, key="depth"))
    assert Replay(case, keys, tmp_path, target=DeepTarget(30, key="n_layer")).needs == replay.needs
