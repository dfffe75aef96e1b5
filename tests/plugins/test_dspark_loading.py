"""Faulty checkpoints of DSpark drafters load, or are refused in words that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_cases import Change, load
from golden_cases import GoldenTarget
from specreg_dspark.random_drafter import random_dspark
from torch import Tensor

from specreg.errors import CheckpointError, SpecregError
from specreg.model_config import read_model_config
from specreg.testing import save_kit_target

FULL, REDUCED, RECURRENT = "dspark-1", "dspark-2", "dspark-3"
VOCAB, HIDDEN, NUM_COLUMNS, RANK = 160, 64, 96, 16
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj"


def form_of(name: str) -> str:
    return "checkpoint" if name == RECURRENT else "checkpoint_dense"


def without(*names: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in names:
            (tensors if name in tensors else config).pop(name)

    return change


def with_(**entries: Any) -> Change:
    """Tensors and keys that are added or replaced; two underscores stand for a dot."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[key.replace("__", ".")] = value
            else:
                config[key] = value

    return change


def with_prefix(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


EMBEDDING, HEAD = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
LOADS = [
    (FULL, "as it is: no head, no embedding", with_()),
    (FULL, "an embedding of its own", with_(embed_tokens__weight=EMBEDDING)),
    (FULL, "a head of its own", with_(lm_head__weight=HEAD)),
    (FULL, "a head in fp16", with_(lm_head__weight=HEAD.half(), has_own_lm_head=True)),
    (FULL, "no draft_vocab_size", without("draft_vocab_size")),
    (FULL, "names with a prefix", with_prefix),
    (FULL, "a confidence head that is not wanted", without("enable_confidence_head")),
    (REDUCED, "as it is", with_()),
    (REDUCED, "no t2d", without("t2d")),
    (RECURRENT, "as it is", with_()),
]


@pytest.mark.parametrize(("name", "what", "change"), LOADS, ids=[f"{n}: {w}" for n, w, _ in LOADS])
def test_it_loads(name: str, what: str, change: Change, tmp_path: Path) -> None:
    speculator = load(name, tmp_path, change, form_of(name), dtype=torch.bfloat16)
    assert not [n for n, tensor in speculator.head.state_dict().items() if tensor.is_meta]
    backbone = speculator.backbone
    missing = {n for n, tensor in backbone.state_dict().items() if tensor.is_meta}
    assert missing <= {f"ends.{n}" for n in ("embed_tokens.weight", "lm_head.weight", "d2t")}
    assert backbone.ends.shares_embedding == ("an embedding" not in what)
    assert backbone.ends.shares_head == ("a head" not in what and name != REDUCED)
    assert (speculator.confidence is None) == ("not wanted" in what)
    loaded = {*backbone.parameters(), *speculator.head.parameters()}
    num_bytes = sum(p.nbytes for p in loaded if not p.is_meta)
    buffers = 8 * NUM_COLUMNS if name == REDUCED else 0
    assert num_bytes <= speculator.weight_bytes() <= num_bytes + buffers


def row(name: str, what: str, change: Change, message: str) -> Any:
    return pytest.param(name, change, message, id=f"{name}: {what}")


REFUSED = [
    row(FULL, "no W1", without(W1), rf"1 without a tensor: {W1} \[160, 16\]"),
    row(FULL, "no W2", without(W2), rf"1 without a tensor: {W2} \[160, 16\]"),
    row(
        FULL,
        "a W2 padded to a multiple of 64",
        with_(markov_head__markov_w2__weight=torch.zeros(192, RANK)),
        rf"'{W2}' \[192, 16\]; allowed: \[160, 16\]",
    ),
    row(FULL, "another rank", with_(markov_rank=8), r"'\S+' \[1, 80\]; allowed: \[1, 72\]"),
    row(
        FULL,
        "a head of another kind than the config says",
        with_(markov_head_type="gated"),
        r"2 without a tensor: markov_head.gate_proj.bias \[16\], "
        r"markov_head.gate_proj.weight \[16, 80\]",
    ),
    row(
        RECURRENT,
        "parts that a vanilla head does not have",
        with_(markov_head_type="vanilla"),
        "no place in the drafter.*'markov_head.joint_proj.bias'",
    ),
    row(
        FULL,
        "no confidence head where there is to be one",
        without(f"{CONFIDENCE}.weight", f"{CONFIDENCE}.bias"),
        rf"2 without a tensor: {CONFIDENCE}.bias \[1\], {CONFIDENCE}.weight \[1, 80\]",
    ),
    row(
        FULL,
        "a confidence head of another input",
        with_(confidence_head_with_markov=False),
        rf"'{CONFIDENCE}.weight' \[1, 80\]; allowed: \[1, 64\]",
    ),
    row(FULL, "no projection", without("fc.weight"), r"fc.weight \[64, 128\]"),
    row(
        FULL,
        "four taps and a projection of two",
        with_(target_layer_ids=[0, 1, 2, 3]),
        r"'fc.weight' \[64, 128\]; allowed: \[64, 256\]",
    ),
    row(
        FULL,
        "a W2 that is quantised",
        with_(markov_head__markov_w2__weight=torch.zeros(VOCAB, RANK, dtype=torch.int8)),
        f"quantised.*'{W2}'",
    ),
    row(
        FULL,
        "a scale that is left over",
        with_(markov_head__markov_w2__weight_scale=torch.ones(1)),
        "no place in the drafter.*'markov_head.markov_w2.weight_scale'",
    ),
    row(
        FULL,
        "tables of a smaller vocabulary",
        with_(
            vocab_size=150,
            draft_vocab_size=150,
            markov_head__markov_w1__weight=torch.zeros(150, RANK),
            markov_head__markov_w2__weight=torch.zeros(150, RANK),
            lm_head__weight=HEAD[:150].clone(),
            d2t=torch.zeros(150, dtype=torch.int64),
            mask_token_id=3,
        ),
        "cannot embed every token of the target.*150; allowed: at least 160",
    ),
    row(REDUCED, "no map", without("d2t"), "has no map into the target's.*96 columns"),
    row(REDUCED, "no head", without("lm_head.weight"), "has no head and cannot share"),
    row(
        REDUCED,
        "no draft_vocab_size",
        without("draft_vocab_size"),
        r"'\S+' \[96.*\]; allowed: \[160.*\]",
    ),
    row(
        REDUCED,
        "a map of another length",
        with_(d2t=torch.zeros(95, dtype=torch.int64)),
        r"'d2t' \[95\]; allowed: \[96\]",
    ),
    row(
        REDUCED,
        "a map out of range",
        with_(d2t=torch.full((NUM_COLUMNS,), 65)),
        "ids that repeat or lie outside, such as .160",
    ),
    row(
        REDUCED,
        "a W2 of the whole vocabulary",
        with_(markov_head__markov_w2__weight=torch.zeros(VOCAB, RANK)),
        rf"'{W2}' \[160, 16\]; allowed: \[96, 16\]",
    ),
    row(
        FULL,
        "a larger vocabulary",
        with_(draft_vocab_size=170, vocab_size=170),
        r"; allowed: \[170, 16\]",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_it_is_refused(name: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecregError, match=f"(?s){message}"):
        load(name, tmp_path, change, form_of(name))


def test_a_drafter_of_another_width_than_the_target_is_refused(tmp_path: Path) -> None:
    target = GoldenTarget()
    target.hidden_size = 128
    with pytest.raises(CheckpointError, match="made for another target"):
        load(FULL, tmp_path, target=target)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("is_anchor_first", [True, False])
def test_random_drafters_are_of_the_kind_that_is_asked_for(
    head: str, is_anchor_first: bool, tmp_path: Path
) -> None:
    config = read_model_config(str(save_kit_target(tmp_path / "target"))) or {}
    folder = tmp_path / "draft"
    made = random_dspark(folder, config, sample_from_anchor=is_anchor_first, markov_head=head)
    assert made == {"method": "dspark", "model": str(folder)}
    written = read_model_config(str(folder)) or {}
    assert written["markov_head_type"] == head
    assert written["sample_from_anchor"] == is_anchor_first
