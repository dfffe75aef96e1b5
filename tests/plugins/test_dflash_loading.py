"""Faulty checkpoints of block drafters load, or are refused in words that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import altered, load
from golden_cases import GoldenCase, GoldenTarget, Replay
from safetensors.torch import save_file
from specreg_dflash.backbone import Backbone
from specreg_dflash.layer import BlockLayer
from torch import Tensor

from specreg.errors import CheckpointError, SpecregError

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
FULL, REDUCED, XPRESS = "dflash-1", "dflash-2", "xpress-1"
VOCAB, HIDDEN, NUM_COLUMNS = 160, 64, 96


def without(*names: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in names:
            (tensors if name in tensors else config).pop(name)

    return change


def with_(section: dict[str, Any] | None = None, **entries: Any) -> Change:
    """Tensors and keys that are added or replaced; two underscores stand for a dot."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.get("dflash_config", {}).update(section or {})
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[key.replace("__", ".")] = value
            else:
                config[key] = value

    return change


def in_decoder(**entries: Any) -> Change:
    return lambda tensors, config: config["transformer_layer_config"].update(entries)


def form_of(name: str) -> str:
    return "checkpoint_vllm" if name == XPRESS else "checkpoint_hf"


def without_context_projection(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """A drafter of half the target's width that reads the target's last hidden state."""
    tensors.pop("fc.weight")
    config["dflash_config"]["use_aux_hidden_state"] = False
    config |= {"hidden_size": 32, "target_hidden_size": 64, "num_attention_heads": 2}
    for name, tensor in tensors.items():
        narrow = (slice(32) if size == HIDDEN else slice(None) for size in tensor.shape)
        tensors[name] = tensor[tuple(narrow)].clone()
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.zeros(VOCAB, 32)


EMBEDDING, HEAD = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
LOADS = [
    (FULL, "as it is: no head, no embedding", with_()),
    (FULL, "an embedding of its own", with_(embed_tokens__weight=EMBEDDING)),
    (FULL, "a head of its own", with_(lm_head__weight=HEAD)),
    (FULL, "a head in fp16", with_(lm_head__weight=HEAD.half(), has_own_lm_head=True)),
    (REDUCED, "as it is", with_()),
    (REDUCED, "no t2d", without("t2d")),
    (REDUCED, "offsets in int32", with_(d2t=torch.arange(NUM_COLUMNS).int() // 2)),
    (XPRESS, "as it is", with_()),
    (XPRESS, "a head of its own", with_(lm_head__weight=HEAD)),
]


@pytest.mark.parametrize(("name", "what", "change"), LOADS, ids=[f"{n}: {w}" for n, w, _ in LOADS])
def test_it_loads(name: str, what: str, change: Change, tmp_path: Path) -> None:
    speculator = load(name, tmp_path, change, form_of(name), dtype=torch.bfloat16)
    backbone = speculator.backbone
    loaded = [p for m in (backbone, speculator.head) for p in m.parameters() if not p.is_meta]
    assert {parameter.dtype for parameter in loaded} == {torch.bfloat16}
    missing = {name for name, tensor in backbone.state_dict().items() if tensor.is_meta}
    assert missing <= {f"ends.{name}" for name in ("embed_tokens.weight", "lm_head.weight", "d2t")}
    ends = backbone.ends
    assert ends.shares_embedding == ("ends.embed_tokens.weight" in missing)
    assert ends.shares_head == ("ends.lm_head.weight" in missing)
    assert (ends.shares_head, ends.shares_embedding) == (
        "head" not in what.split(": ")[0] and name != REDUCED,
        "embedding" not in what.split(": ")[0],
    )
    num_bytes = sum(p.nbytes for p in loaded)
    buffers = 8 * NUM_COLUMNS if name == REDUCED else 0
    assert num_bytes <= speculator.weight_bytes() <= num_bytes + buffers


REFUSED = [
    (
        FULL,
        "no projection of the context",
        without("fc.weight"),
        r"1 without a tensor: fc.weight \[64, 128\]",
    ),
    (
        FULL,
        "more taps than the projection is wide",
        with_({"target_layer_ids": [0, 1, 3]}),
        r"'fc.weight' \[64, 128\]; allowed: \[64, 192\]",
    ),
    (
        FULL,
        "taps of a wider target",
        with_(target_hidden_size=32, fc__weight=torch.randn(64, 64)),
        "target_hidden_size.*32; allowed: 64",
    ),
    (
        FULL,
        "the last hidden state of a wider target, and nothing that projects it",
        without_context_projection,
        "hidden_size.*32; allowed: 64",
    ),
    (
        FULL,
        "a rotary embedding that is no object",
        with_(rope_parameters="yarn"),
        "wrong 'rope_parameters'.*'yarn'; allowed: an object",
    ),
    (FULL, "of a deeper target", with_(num_target_layers=9), "num_target_layers.*9; allowed: 6"),
    (
        FULL,
        "a tap behind the last layer",
        with_({"target_layer_ids": [1, 6]}),
        "last tapped layer.*7; allowed: at most 6",
    ),
    (
        FULL,
        "a head that the config promises",
        with_(has_own_lm_head=True),
        r"1 without a tensor: lm_head.weight \[160, 64\]",
    ),
    (
        FULL,
        "a head of other columns",
        with_(lm_head__weight=torch.randn(NUM_COLUMNS, HIDDEN)),
        r"'lm_head.weight' \[96, 64\]; allowed: \[160, 64\]",
    ),
    (
        FULL,
        "an embedding of too few rows",
        with_(embed_tokens__weight=EMBEDDING[:50], vocab_size=50),
        "cannot embed every token.*50 rows; allowed: at least 160",
    ),
    (
        FULL,
        "a head that is quantised",
        with_(lm_head__weight=torch.zeros(VOCAB, HIDDEN).to(torch.int8)),
        "lm_head.weight",
    ),
    (
        FULL,
        "a scale that is left over",
        with_(layers__0__mlp__up_proj__weight_scale=torch.ones(1)),
        "layers.0.mlp.up_proj.weight_scale",
    ),
    (
        FULL,
        "the mask vector of another kind of drafter",
        with_(mask_hidden=torch.zeros(HIDDEN)),
        "no place in the drafter.*'mask_hidden'",
    ),
    (
        FULL,
        "biases that the config does not know",
        with_(layers__1__self_attn__q_proj__bias=torch.zeros(HIDDEN)),
        "layers.1.self_attn.q_proj.bias",
    ),
    (
        FULL,
        "a mask token without an embedding",
        with_({"mask_token_id": 160}),
        "mask token of a drafter has no embedding.*160; allowed: below 160",
    ),
    (
        FULL,
        "one tensor twice",
        with_(encoder__fc__weight=torch.zeros(64, 128)),
        "two tensors of the checkpoint are for one parameter",
    ),
    (
        FULL,
        "a larger vocabulary",
        with_(draft_vocab_size=170, vocab_size=170),
        "larger vocabulary than the target.*170; allowed: at most 160",
    ),
    (
        REDUCED,
        "a reduced vocabulary without a size",
        without("draft_vocab_size"),
        r"\[96\]; allowed: \[160\]|\[96, 64\]; allowed: \[160, 64\]",
    ),
    (REDUCED, "no map", without("d2t"), "has no map into the target's.*96 columns"),
    (
        REDUCED,
        "a map of another length",
        with_(d2t=torch.zeros(95, dtype=torch.int64)),
        r"'d2t' \[95\]; allowed: \[96\]",
    ),
    (
        REDUCED,
        "a map out of range",
        with_(d2t=torch.full((NUM_COLUMNS,), 65)),
        "ids that repeat or lie outside, such as .160",
    ),
    (
        REDUCED,
        "a map that repeats",
        with_(d2t=-torch.arange(NUM_COLUMNS)),
        "ids that repeat or lie outside, such as .0",
    ),
    (REDUCED, "no head", without("lm_head.weight"), "has no head and cannot share the target's"),
    (
        XPRESS,
        "a reduced vocabulary",
        with_(draft_vocab_size=NUM_COLUMNS),
        "needs the whole vocabulary.*96; allowed: the vocab_size 160",
    ),
    (
        XPRESS,
        "no mixer",
        without("xpress_head.mix.L"),
        r"1 without a tensor: xpress_head.mix.L \[16, 5, 5\]",
    ),
    (
        XPRESS,
        "no readout",
        without("xpress_head.w2.weight"),
        r"1 without a tensor: xpress_head.w2.weight \[160, 16\]",
    ),
    (
        XPRESS,
        "a mixer of another block",
        with_(xpress_block_size=9),
        r"'xpress_head.mix.L' \[16, 5, 5\]; allowed: \[16, 9, 9\]",
    ),
    (
        XPRESS,
        "a refiner of another rank",
        with_(xpress_rank=8),
        r"'xpress_head\.\S+' .*; allowed: ",
    ),
    (
        XPRESS,
        "a part of the refiner that is not known",
        with_(xpress_head__gate__weight=torch.zeros(2)),
        "no place in the drafter.*'xpress_head.gate.weight'",
    ),
]


@pytest.mark.parametrize(
    ("name", "what", "change", "message"), REFUSED, ids=[f"{n}: {w}" for n, w, *_ in REFUSED]
)
def test_it_is_refused(name: str, what: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecregError, match=f"(?s){message}"):
        load(name, tmp_path, change, form_of(name))


def test_a_drafter_of_another_width_than_the_target_is_refused(tmp_path: Path) -> None:
    target = GoldenTarget()
    target.hidden_size = 128
    with pytest.raises(CheckpointError, match="made for another target"):
        load(FULL, tmp_path, target=target)
    wide = with_(target_hidden_size=128, fc__weight=torch.randn(64, 256))
    with pytest.raises(CheckpointError, match="has no embedding and cannot share the target's"):
        load(FULL, tmp_path / "wide", wide, target=target)


MASKS = [
    ({"mask_embedding": torch.zeros(63)}, r"\[63\]\}; allowed: a tensor 'mask_embedding' of 64"),
    (
        {"mask_embedding": torch.zeros(64), "mask_token_id": torch.tensor(3)},
        "an embedding of token 3",
    ),
    ({"mask": torch.zeros(64)}, r"'mask': \[64\]\}; allowed"),
]


@pytest.mark.parametrize(("held", "message"), MASKS, ids=["shape", "token", "name"])
def test_a_mask_embedding_that_does_not_fit_is_refused(
    held: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    checkpoint = altered(FULL, tmp_path)
    save_file(held, checkpoint.directory / "mask_embedding.safetensors")
    with pytest.raises(CheckpointError, match=f"(?s)mask rows cannot be used.*{message}"):
        Replay(GoldenCase(FULL), {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)


def test_a_broken_mask_embedding_is_refused(tmp_path: Path) -> None:
    checkpoint = altered(FULL, tmp_path)
    (checkpoint.directory / "mask_embedding.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="mask rows cannot be used"):
        Replay(GoldenCase(FULL), {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)


def test_a_pickled_mask_embedding_is_not_read(tmp_path: Path) -> None:
    checkpoint = altered(FULL, tmp_path)
    torch.save(torch.zeros(HIDDEN), checkpoint.directory / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"(?s)is pickled.*convert it to safetensors"):
        Replay(GoldenCase(FULL), {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)


def test_weights_of_another_file_name_leave_the_mask_embedding_to_its_reader(
    tmp_path: Path,
) -> None:
    checkpoint = altered(FULL, tmp_path)
    (checkpoint.directory / "model.safetensors").rename(checkpoint.directory / "own.safetensors")
    held = {"mask_embedding": torch.ones(HIDDEN)}
    save_file(held, checkpoint.directory / "mask_embedding.safetensors")
    keys = {"method": "dflash", "model": str(checkpoint.directory)}
    speculator: Any = Replay(GoldenCase(FULL), keys, tmp_path).speculator
    assert torch.equal(speculator.backbone.mask_embedding, torch.ones(HIDDEN))


def test_a_mask_token_beyond_the_target_is_fine_with_an_embedding_of_its_own(
    tmp_path: Path,
) -> None:
    checkpoint = altered(FULL, tmp_path, with_({"mask_token_id": 500}))
    held = {"mask_embedding": torch.ones(HIDDEN)}
    save_file(held, checkpoint.directory / "mask_embedding.safetensors")
    keys = {"method": "dflash", "model": str(checkpoint.directory)}
    speculator: Any = Replay(GoldenCase(FULL), keys, tmp_path).speculator
    assert torch.equal(speculator.backbone.mask_embedding, torch.ones(HIDDEN))


def test_the_backbone_makes_the_layers_that_it_is_told_to(tmp_path: Path) -> None:
    class Special(BlockLayer):
        pass

    made = Backbone(load(FULL, tmp_path).backbone.config, Special)
    assert [type(layer) for layer in made.layers] == [Special, Special]
    assert all(parameter.is_meta for parameter in made.parameters())
