"""Checkpoints of DFlash2 and LiLiCorr, whole and faulty, and the memory that loading takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GoldenCase, GoldenTarget, Replay
from peak_memory import Peak
from safetensors.torch import load_file, save_file
from specreg_dflash.convolution.grouped import GroupedConvolution
from specreg_dflash.convolution.layer import ConvolvedLayer
from specreg_dflash.dflash2.random_drafter import random_dflash2
from specreg_dflash.layer import BlockLayer
from specreg_dflash.lilicorr.random_drafter import random_lilicorr
from torch import Tensor

from specreg.errors import CheckpointError, SpecregError

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCAB_SIZE, HIDDEN = 160, 64


def load(case_name: str, folder: Path, change: Change | None = None, **keys: Any) -> Any:
    """The loaded speculator of a case whose checkpoint was changed."""
    case = GoldenCase(case_name)
    directory = case.checkpoint("checkpoint_hf", folder)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if change is not None:
        change(tensors, config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return Replay(case, {"method": "dflash", "model": str(directory)}, folder, **keys).speculator


def with_(tensors: Tensors | None = None, **keys: Any) -> Change:
    """Tensors and top-level keys that are added or replaced."""

    def change(of_file: Tensors, config: dict[str, Any]) -> None:
        of_file.update({name: tensor.clone() for name, tensor in (tensors or {}).items()})
        config.update(keys)

    return change


def in_section(**keys: Any) -> Change:
    return lambda _tensors, config: config["dflash_config"].update(keys)


def without(name: str) -> Change:
    return lambda tensors, _config: tensors.__delitem__(name)


def renamed(before: str, after: str) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        del config
        for name in [name for name in tensors if re.search(before, name)]:
            tensors[re.sub(before, after, name)] = tensors.pop(name)

    return change


TABLE = torch.randn(VOCAB_SIZE, HIDDEN)
LOADS: list[tuple[str, str, Change]] = [
    ("dflash2-1", "an own head in fp16", with_({HEAD: TABLE.half()})),
    ("dflash2-1", "an own embedding", with_({EMBEDDING: TABLE})),
    ("dflash2-1", "a map that moves nothing", with_({"d2t": torch.zeros(160).long()})),
    ("dflash2-1", "names under model.", renamed("^", "model.")),
    ("dflash2-1", "tables of an embedding module", renamed("codebook$", "codebook.weight")),
    ("lilicorr-1", "an own head", with_({HEAD: TABLE}, has_own_lm_head=True)),
    ("lilicorr-1", "names under model.", renamed("^", "model.")),
]


@pytest.mark.parametrize(("case", "what", "change"), LOADS, ids=[f"{c}: {w}" for c, w, _ in LOADS])
def test_it_loads(case: str, what: str, change: Change, tmp_path: Path) -> None:
    speculator = load(case, tmp_path, change, dtype=torch.bfloat16)
    ends = speculator.backbone.ends
    assert ends.shares_head == ("own head" not in what)
    assert ends.shares_embedding == ("own embedding" not in what)
    assert speculator.target_ids is None
    loaded = [p for p in speculator.head.parameters()]
    assert loaded
    assert {(p.dtype, p.is_meta) for p in loaded} == {(torch.bfloat16, False)}
    parameters = {
        name: parameter.is_meta for name, parameter in speculator.backbone.named_parameters()
    }
    assert {name for name, is_meta in parameters.items() if is_meta} <= {
        f"ends.{EMBEDDING}",
        f"ends.{HEAD}",
    }


def test_the_beam_kind_takes_the_targets_head_whatever_the_file_has(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors |= {HEAD: TABLE.clone(), EMBEDDING: TABLE.clone()}
        config["architectures"] = ["DFlash2BeamDraftModel"]
        config["layer_types"] = ["sliding_attention"] * 2

    ends = load("dflash2-2", tmp_path, change).backbone.ends
    assert ends.shares_head
    assert ends.shares_embedding


class OtherTarget(GoldenTarget):
    """The golden target with fewer ids, or another width."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = torch.randn(vocab_size, hidden_size)
        self.head = torch.randn(vocab_size, hidden_size)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size


MOVING = torch.tensor([1, -1] * 80)
REFUSED: list[tuple[str, str, Change, str]] = [
    (
        "dflash2-1",
        "a convolution is missing",
        without("layers.1.mlp_conv.base_kernel"),
        r"1 without a tensor: .*layers.1.mlp_conv.base_kernel \[2, 2, 64\]",
    ),
    (
        "dflash2-1",
        "a table is missing",
        without("candidate_selector.successor_codebook"),
        r"1 without a tensor: .*candidate_selector.successor_codebook \[160, 8\]",
    ),
    (
        "dflash2-1",
        "a table of draft ids",
        with_({"candidate_selector.predecessor_codebook": torch.randn(96, 8)}),
        r"'candidate_selector.predecessor_codebook' \[96, 8\]; allowed: \[160, 8\]",
    ),
    (
        "dflash2-1",
        "a rank that the config does not say",
        in_section(selector_rank=4),
        r"'candidate_selector.hidden_projection.weight' \[8, 64\]; allowed: \[4, 64\]",
    ),
    (
        "dflash2-1",
        "a convolution of other groups",
        in_section(conv_group_size=32),
        r"attention_conv.kernel_projection.weight' \[16, 64\]; allowed: \[8, 64\]",
    ),
    (
        "dflash2-1",
        "a map that moves ids",
        with_({"d2t": MOVING}),
        r"another vocabulary than the target.*a map d2t that moves ids; allowed: the target's 160",
    ),
    (
        "dflash2-1",
        "a map of another length",
        with_({"d2t": MOVING[:150]}),
        r"another shape.*'d2t' \[150\]; allowed: \[160\]",
    ),
    (
        "dflash2-1",
        "a map out of range",
        with_({"d2t": torch.ones(160).long()}),
        r"does not map into the target.*such as \[160\]",
    ),
    (
        "dflash2-1",
        "a reduced vocabulary",
        with_({HEAD: TABLE[:96], "d2t": torch.zeros(96).long()}, draft_vocab_size=96),
        r"needs the whole vocabulary.*draft_vocab_size.*96; allowed: the vocab_size 160",
    ),
    (
        "dflash2-1",
        "a head in fp8",
        with_({HEAD: TABLE.to(torch.float8_e4m3fn)}),
        r"quantised.*'lm_head.weight' in torch.float8_e4m3fn",
    ),
    (
        "dflash2-1",
        "a scale that nothing reads",
        with_({"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
        r"no place in the drafter.*'layers.0.mlp.up_proj.weight_scale'",
    ),
    (
        "dflash2-1",
        "another target",
        with_(num_target_layers=7),
        r"made for another target.*num_target_layers.*7; allowed: 6",
    ),
    (
        "lilicorr-1",
        "its own head is missing",
        with_(has_own_lm_head=True),
        r"1 without a tensor: .*lm_head.weight \[160, 64\]",
    ),
    (
        "lilicorr-1",
        "fewer slots than the block",
        in_section(block_size=5),
        r"'lilicorr.relative_slot_bias' \[2, 11\]; allowed: \[2, 9\]",
    ),
    (
        "lilicorr-1",
        "a projection that a lattice as wide as the backbone does not have",
        in_section(lilicorr_hidden_size=64),
        r"another shape|no place in the drafter",
    ),
]


@pytest.mark.parametrize(
    ("case", "what", "change", "message"), REFUSED, ids=[f"{c}: {w}" for c, w, *_ in REFUSED]
)
def test_it_is_refused(case: str, what: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecregError, match=re.compile(message, re.DOTALL)):
        load(case, tmp_path, change)


@pytest.mark.parametrize("case", ["dflash2-1", "lilicorr-1"])
def test_a_target_of_another_width_is_another_target(case: str, tmp_path: Path) -> None:
    message = re.compile(r"another target.*target_hidden_size.*64; allowed: 32", re.DOTALL)
    with pytest.raises(CheckpointError, match=message):
        load(case, tmp_path, target=OtherTarget(hidden_size=32))


@pytest.mark.parametrize("case", ["dflash2-1", "lilicorr-1"])
def test_tables_and_head_of_their_own_do_not_help_with_another_vocabulary(
    case: str, tmp_path: Path
) -> None:
    own = with_({HEAD: TABLE, EMBEDDING: TABLE, "d2t": torch.zeros(160).long()})
    with pytest.raises(CheckpointError, match=r"draft_vocab_size 160; allowed: at most 150"):
        load(case, tmp_path / "more", own, target=OtherTarget(150))
    with pytest.raises(CheckpointError, match=r"160 rows; allowed: at least 170"):
        load(case, tmp_path / "fewer", own, target=OtherTarget(170))
    own = with_({HEAD: TABLE, "d2t": torch.zeros(160).long()})
    with pytest.raises(CheckpointError, match=r"vocab_size 160; allowed: the target's 170 ids"):
        load(case, tmp_path / "shared", own, target=OtherTarget(170))


def test_lilicorr_reads_target_embeddings_and_so_needs_their_width(tmp_path: Path) -> None:
    own = with_(
        {HEAD: TABLE, EMBEDDING: TABLE, "fc.weight": torch.randn(HIDDEN, 2 * 32)},
        target_hidden_size=32,
    )
    with pytest.raises(CheckpointError, match=r"target's embeddings\n.*\n.*64; allowed: 32"):
        load("lilicorr-1", tmp_path, own, target=OtherTarget(hidden_size=32))


LILICORR_TENSORS = [
    name
    for name in load_file(GoldenCase("lilicorr-1").folder / "checkpoint_hf/model.safetensors")
    if name.startswith("lilicorr.") or "_conv." in name
]


@pytest.mark.parametrize("name", LILICORR_TENSORS)
def test_every_tensor_of_the_lattice_and_of_the_convolutions_is_required(
    name: str, tmp_path: Path
) -> None:
    message = f"1 without a tensor: .*{re.escape(name)} "
    with pytest.raises(CheckpointError, match=message):
        load("lilicorr-1", tmp_path, without(name))


def saved(folder: Path, vocab_size: int, method: str = "dflash2") -> tuple[dict[str, Any], Any]:
    """A random drafter of two layers without embedding or head, and its target."""
    target = OtherTarget(vocab_size, 32)
    config = {**target.config, "vocab_size": vocab_size, "hidden_size": 32, "head_dim": 8}
    make = random_dflash2 if method == "dflash2" else random_lilicorr
    return make(folder, config | {"intermediate_size": 64}), target


def bytes_of(folder: Path) -> tuple[int, int]:
    """fp32 bytes of all tensors of a file, and of the largest."""
    sizes = [tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()]
    return sum(sizes), max(sizes)


def test_the_peak_is_that_of_all_storages_that_live_at_once() -> None:
    with Peak() as peak:
        torch.arange(1000).clone().clone()
    assert peak.num_bytes == 2 * 8000


@pytest.mark.parametrize("method", ["dflash2", "lilicorr"])
def test_loading_without_embedding_and_head_holds_the_parameters_and_one_tensor_at_most(
    method: str, tmp_path: Path
) -> None:
    vocab_size = 8192
    drafter, target = saved(tmp_path, vocab_size, method)
    case = GoldenCase("dflash2-1")
    replay = Replay(case, drafter, tmp_path, dtype=torch.bfloat16, target=target)
    speculator: Any = replay.speculator
    again = type(speculator)(speculator.context)
    with Peak(target.embedding, target.head) as peak:
        again.load_model(target)
    in_file, largest = bytes_of(tmp_path)
    own = again.weight_bytes()
    assert own == in_file // 2
    assert own <= peak.num_bytes <= own + largest
    # Embedding and head of its own, made first and thrown away, would not fit.
    assert own + largest < 2 * vocab_size * 32 * 2


def test_a_drafter_of_two_layers_without_embedding_and_head_has_all_its_convolutions(
    tmp_path: Path,
) -> None:
    drafter, target = saved(tmp_path, 64)
    replay = Replay(GoldenCase("dflash2-1"), drafter, tmp_path, target=target)
    layers = replay.speculator.backbone.layers  # type: ignore[attr-defined]
    assert [type(layer) for layer in layers] == [ConvolvedLayer] * 2
    convolutions = [m for m in layers.modules() if isinstance(m, GroupedConvolution)]
    assert len(convolutions) == 4
    assert not any(p.is_meta for m in convolutions for p in m.parameters())


def test_lilicorr_without_convolution_keys_has_plain_layers(tmp_path: Path) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if "_conv." in name]:
            del tensors[name]
        for key in ("conv_kernel_size", "conv_group_size"):
            del config["dflash_config"][key]

    layers = load("lilicorr-1", tmp_path, change).backbone.layers
    assert [type(layer) for layer in layers] == [BlockLayer]


def test_keys_that_nothing_reads_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load("dflash2-1", tmp_path, in_section(selector_temperature=0.5))
    assert "keys that nothing reads: dflash_config.selector_temperature" in caplog.text
