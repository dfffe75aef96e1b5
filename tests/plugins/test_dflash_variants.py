"""Choices of a DFlash config, against the arithmetic written out once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_cases import altered, committed_features, written_out
from golden_cases import GoldenCase, Replay
from safetensors.torch import save_file
from torch import Tensor

CASE = "dflash-3"  # layers: sliding with a window of 6, full
FULL_LAYERS = ["full_attention", "full_attention"]
HEADS, HIDDEN, KV = 4, 64, 32
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def keys(section: dict[str, Any] | None = None, **top: Any) -> Any:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config.update(top)
        config["dflash_config"].update(section or {})

    return change


def with_sinks(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["dflash_config"]["attention_sink_bias"] = True
    for layer in range(2):
        tensors[f"layers.{layer}.self_attn.attention_sink_bias"] = randn(HEADS) + layer


def with_biases(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["attention_bias"] = True
    for layer in range(2):
        for name, size in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            tensors[f"layers.{layer}.self_attn.{name}_proj.bias"] = randn(size) * 0.5


def with_other_names(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for ours, theirs in (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc.")):
        tensors[f"model.{theirs}weight"] = tensors.pop(f"{ours}weight")


SLIDING_FIRST = [6, None]
VARIANTS: dict[str, tuple[Any, list[bool], list[int | None]]] = {
    "as it is": (keys(), [True, False], SLIDING_FIRST),
    "is_causal false": (keys(is_causal=False), [False, False], SLIDING_FIRST),
    "is_causal true": (keys(is_causal=True), [True, True], SLIDING_FIRST),
    "causal true": (keys({"causal": True}), [True, True], SLIDING_FIRST),
    "causal false, window 3": (
        keys({"causal": False}, sliding_window=3),
        [False, False],
        [3, None],
    ),
    "window 1, both ways": (keys(is_causal=False, sliding_window=1), [False, False], [1, None]),
    "is_causal before causal": (
        keys({"causal": True}, is_causal=False),
        [False, False],
        SLIDING_FIRST,
    ),
    "window of the section": (keys({"swa_window_size": 4}), [True, False], [4, None]),
    "use_swa beside layer types that slide": (keys({"use_swa": True}), [True, False], [6, None]),
    "use_swa alone": (keys({"use_swa": True}, layer_types=FULL_LAYERS), [False, False], [6, 6]),
    "use_swa without layer types": (
        keys({"use_swa": True, "swa_window_size": 2}, layer_types=None),
        [False, False],
        [2, 2],
    ),
    "a window that no layer has": (keys(layer_types=None), [False, False], [None, None]),
    "sinks": (with_sinks, [True, False], SLIDING_FIRST),
    "scaled values": (keys({"attention_value_scale": 0.6}), [True, False], SLIDING_FIRST),
    "biases": (with_biases, [True, False], SLIDING_FIRST),
    "scaled logits": (keys(logit_scale=0.25), [True, False], SLIDING_FIRST),
    "scaled embeddings": (keys({"input_embedding_scale": 3.0}), [True, False], SLIDING_FIRST),
    "no theta": (keys(rope_parameters=None), [True, False], SLIDING_FIRST),
    "another theta": (keys(rope_parameters={"rope_theta": 50.0}), [True, False], SLIDING_FIRST),
    "names of another library": (with_other_names, [True, False], SLIDING_FIRST),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_what_its_config_says(name: str, tmp_path: Path) -> None:
    change, is_causal, windows = VARIANTS[name]
    case, checkpoint = GoldenCase(CASE), altered(CASE, tmp_path, change)
    tensors = checkpoint.tensors
    if name == "names of another library":
        tensors = altered(CASE, tmp_path / "original").tensors
    replay = Replay(case, {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)
    for index, proposed in replay.rounds(chunk=5):
        expected = written_out(
            tensors,
            checkpoint.config,
            committed_features(case, index),
            case.integer(index, "anchor_id"),
            len(proposed.tokens) + 1,
            is_causal=is_causal,
            windows=windows,
        )
        torch.testing.assert_close(proposed.logits, expected.logits[1:], **CLOSE)


@pytest.mark.parametrize("has_token", [False, True])
def test_an_embedding_beside_the_weights_stands_on_mask_rows(
    has_token: bool, tmp_path: Path
) -> None:
    case, checkpoint = GoldenCase(CASE), altered(CASE, tmp_path)
    mask = randn(HIDDEN)
    held = {"mask_embedding": mask[None]}
    if has_token:
        held["mask_token_id"] = torch.tensor(159)
    save_file(held, checkpoint.directory / "mask_embedding.safetensors")
    replay = Replay(case, {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)
    for index, proposed in replay.rounds():
        expected = written_out(
            checkpoint.tensors,
            checkpoint.config,
            committed_features(case, index),
            case.integer(index, "anchor_id"),
            len(proposed.tokens) + 1,
            is_causal=[True, False],
            windows=[6, None],
            mask=mask,
        )
        torch.testing.assert_close(proposed.logits, expected.logits[1:], **CLOSE)


def test_a_drafter_without_taps_reads_the_last_hidden_state(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["fc.weight"]
        config["dflash_config"].update(use_aux_hidden_state=False)
        del config["dflash_config"]["target_layer_ids"]

    case, checkpoint = GoldenCase(CASE), altered(CASE, tmp_path, change)
    for index in range(1, case.num_rounds + 1):
        states = randn(len(case.tensor(index, "row_ids")), HIDDEN)
        case._tensors[f"round{index}.target_hidden"] = states
    replay = Replay(case, {"method": "dflash", "model": str(checkpoint.directory)}, tmp_path)
    for index, proposed in replay.rounds():
        expected = written_out(
            checkpoint.tensors,
            checkpoint.config,
            committed_features(case, index, "target_hidden"),
            case.integer(index, "anchor_id"),
            len(proposed.tokens) + 1,
            is_causal=[True, False],
            windows=[6, None],
        )
        torch.testing.assert_close(proposed.logits, expected.logits[1:], **CLOSE)
