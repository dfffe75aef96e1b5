"""Altered checkpoints of block drafters, and their arithmetic written out once more."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden_cases import GoldenCase, GoldenTarget, Replay
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Altered", "Expected", "altered", "committed_features", "load", "written_out"]

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]


class Altered(NamedTuple):
    """A changed copy of a case's checkpoint."""

    directory: Path
    tensors: Tensors
    config: dict[str, Any]


def altered(
    name: str,
    folder: Path,
    change: Change = lambda tensors, config: None,
    form: str = "checkpoint_hf",
) -> Altered:
    """Copy a case's checkpoint, change it and write it back."""
    directory = GoldenCase(name).checkpoint(form, folder)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return Altered(directory, tensors, config)


def load(
    name: str,
    folder: Path,
    change: Change = lambda t, c: None,
    form: str = "checkpoint_hf",
    **k: Any,
) -> Any:
    """The loaded speculator of a changed case."""
    directory = altered(name, folder, change, form).directory
    keys = {"method": "dflash", "model": str(directory), **k.pop("speculative", {})}
    return Replay(GoldenCase(name), keys, folder, **k).speculator


def committed_features(case: GoldenCase, index: int, name: str = "aux_hidden") -> Tensor:
    """States of every token that is valid in a round, the newest one's not among them."""
    parts = []
    for round_index in range(1, index + 1):
        num_valid = case.integer(round_index, "num_valid_rows")
        parts.append(case.tensor(round_index, name)[:num_valid])
    return torch.cat(parts)


class Expected(NamedTuple):
    """What a block comes to: `[num_rows, hidden_size]`, `[num_rows, vocab_size]` (row 0 too)."""

    hidden: Tensor
    logits: Tensor


def written_out(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    features: Tensor,
    anchor: int,
    num_rows: int,
    *,
    is_causal: list[bool],
    windows: list[int | None],
    mask: Tensor | None = None,
) -> Expected:
    """A block over its whole context in fp64, without pages, caches or modules.

    Args:
        tensors, config: of a checkpoint in the Hugging Face form, without a reduced vocabulary.
        features: `[context length, width]`.
        anchor: its token, which stands behind the context.
        num_rows: of the block.
        is_causal, windows: a layer.
        mask: `[hidden_size]`, the embedding of mask rows; None takes the mask token's.
    """
    w = {name: tensor.double() for name, tensor in tensors.items()}
    section, eps, head_dim = config["dflash_config"], config["rms_norm_eps"], config["head_dim"]
    target = GoldenTarget(torch.float64)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def linear(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        y = x @ w[f"{name}.weight"].T
        return y if bias is None else y + bias

    theta = (config.get("rope_parameters") or {}).get("rope_theta", 1e6)
    rates = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None, None] * rates
        a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    length = len(features)
    positions = torch.arange(length + num_rows).double()
    context = features.double()
    if "fc.weight" in w:
        context = context @ w["fc.weight"].T
    context = norm(context, "hidden_norm.weight")
    ids = torch.tensor([anchor] + [section["mask_token_id"]] * (num_rows - 1))
    stream = target.embedding[ids]
    if mask is not None:
        stream[1:] = mask.double()
    stream = stream * section.get("input_embedding_scale", 1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        h = norm(stream, f"{at}input_layernorm.weight")
        both = torch.cat((context, h))
        q = linear(h, f"{at}self_attn.q_proj").unflatten(-1, (-1, head_dim))
        k, v = (linear(both, f"{at}self_attn.{n}_proj").unflatten(-1, (-1, head_dim)) for n in "kv")
        q = rotate(norm(q, f"{at}self_attn.q_norm.weight"), positions[length:])
        k = rotate(norm(k, f"{at}self_attn.k_norm.weight"), positions)
        v = v * section.get("attention_value_scale", 1.0)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        distance = positions[length:, None] - positions
        hidden_keys = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal[layer]:
            hidden_keys |= distance < 0
        if windows[layer] is not None:
            hidden_keys |= distance >= windows[layer]
            hidden_keys |= -distance >= windows[layer]
        scores = scores.masked_fill(hidden_keys, -torch.inf)
        sinks = w.get(f"{at}self_attn.attention_sink_bias")
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, num_rows, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : len(positions)]
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        stream = stream + linear(attended, f"{at}self_attn.o_proj")
        h = norm(stream, f"{at}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(linear(h, f"{at}mlp.gate_proj"))
        stream = stream + linear(gate * linear(h, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
    y = norm(stream, "norm.weight")
    head = w.get("lm_head.weight", target.head)
    return Expected(y.float(), (y @ head.T * config.get("logit_scale", 1.0)).float())
