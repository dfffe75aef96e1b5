"""EAGLE heads written out once more, in float64 and without a cache, and checkpoints to fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_cases import CPU, GoldenCase, GoldenTarget
from safetensors.torch import load_file, save_file
from specreg_eagle.aux_layers import aux_layer_ids
from specreg_eagle.eagle1_config import Eagle1Config
from specreg_eagle.eagle1_head import Eagle1Head
from specreg_eagle.eagle3_config import Eagle3Config
from specreg_eagle.eagle3_head import Eagle3Head
from torch import Tensor, nn

Config = dict[str, Any]
SIZES: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": 160,
}
EAGLE1: Config = {"architectures": ["LlamaForCausalLM"], "bias": False, **SIZES}
EAGLE3: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "draft_vocab_size": 96,
    **SIZES,
}


def save_head(directory: Path, config: Config, *, without: tuple[str, ...] = ()) -> Path:
    """A checkpoint with random weights whose tensors are those that the config asks for."""
    head: nn.Module
    if "eagle_aux_hidden_state_layer_ids" in config or "eagle_config" in config:
        read = Eagle3Config.read(config, "test")
        ids = aux_layer_ids(read, 6) if read.uses_aux_states else ()
        has_masks = read.mask_token_id is not None
        head = Eagle3Head(read, len(ids), "test", CPU, has_masks=has_masks)
    else:
        one = Eagle1Config.read(config, "test")
        head = Eagle1Head(one, one.vocab_size, "test", CPU)
        without = (*without, "d2t")
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for full_name, like in head.state_dict().items():
        name = full_name.removeprefix("ends.").removeprefix("fusion.")
        if name == "d2t":
            tensors[name] = torch.arange(len(like)) // 2 if len(like) < 160 else 0 * like.long()
        elif like.dim() == 1 and not name.endswith("bias"):
            tensors[name] = 1 + 0.3 * torch.randn(like.shape, generator=generator)
        else:
            scale = 1.5 * like.shape[-1] ** -0.5 if like.dim() > 1 else 0.3
            tensors[name] = scale * torch.randn(like.shape, generator=generator)
    kept = {name: t.clone() for name, t in _off_meta(tensors).items() if name not in without}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(kept, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _off_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t for n, t in tensors.items()}


class Reference:
    """A head over all rows at once; `config` is flat."""

    def __init__(self, directory: Path, config: Config) -> None:
        loaded = load_file(directory / "model.safetensors")
        self.weights = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in loaded.items()
        }
        self.config = config
        target = GoldenTarget(torch.float64)
        self.embedding = self.weights.get("embed_tokens.weight", target.embedding)
        self.head = self.weights.get("lm_head.weight", target.head)
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self.weights

    def logits(self, ids: Tensor, states: Tensor, drafts: list[int]) -> Tensor:
        """Logits of each draft: real rows of (token of p + 1, state of p), then the drafts."""
        ids, states = ids.clone(), self.fused(states.double())
        scored = []
        for draft in drafts:
            to_score, to_feed = self.layers(ids, states)
            scored.append(to_score[-1] @ self.head.T * self.config.get("logit_scale", 1.0))
            ids = torch.cat([ids, torch.tensor([draft])])
            states = torch.cat([states, to_feed[-1:]])
        return torch.stack(scored).float()

    def fused(self, states: Tensor) -> Tensor:
        if "input_norm.weight" in self.weights:
            states = self.norm(states, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            parts = states.chunk(states.shape[-1] // 64, dim=-1)
            normed = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            states = torch.cat(normed, dim=-1)
        has_fusion = self.is_eagle3 and "fc.weight" in self.weights
        return states @ self.weights["fc.weight"].T if has_fusion else states

    def layers(self, ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding[ids]
        stream = states
        if not self.is_eagle3:
            stream = self.linear(torch.cat([embedded, states], dim=-1), "fc")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            if f"{name}.hidden_norm.weight" in self.weights:
                normed = self.norm(states, f"{name}.hidden_norm")
                x = torch.cat([self.norm(embedded, f"{name}.input_layernorm"), normed], dim=-1)
                stream = normed if self.config.get("norm_before_residual") else states
            elif f"{name}.input_layernorm.weight" in self.weights:
                x = self.norm(stream, f"{name}.input_layernorm")
            else:
                x = stream
            stream = stream + self.attention(x, layer)
            y = self.norm(stream, f"{name}.post_attention_layernorm")
            gate = F.silu(self.linear(y, f"{name}.mlp.gate_proj"))
            stream = stream + self.linear(
                gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
            )
        if "norm.weight" not in self.weights:
            return stream, stream
        normed = self.norm(stream, "norm")
        feeds_normed = self.config.get("norm_output") or not self.is_eagle3
        return normed, normed if feeds_normed else stream

    def attention(self, x: Tensor, layer: int) -> Tensor:
        name, config = f"layers.{layer}.self_attn", self.config
        heads, dim = config["num_attention_heads"], config["head_dim"]
        query, key, value = (
            self.linear(x, f"{name}.{kind}_proj").view(len(x), -1, dim).transpose(0, 1)
            for kind in "qkv"
        )
        if f"{name}.q_norm.weight" in self.weights:
            query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
        query, key = self.rotated(query), self.rotated(key)
        key, value = (t.repeat_interleave(heads // len(t), dim=0) for t in (key, value))
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        is_visible = distance >= 0
        types = config.get("layer_types") or ["full_attention"] * (layer + 1)
        if types[layer] == "sliding_attention":
            is_visible &= distance < config["sliding_window"]
        scores = (query @ key.transpose(1, 2) * dim**-0.5).masked_fill(~is_visible, -torch.inf)
        out = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        return self.linear(out, f"{name}.o_proj")

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        turns = torch.polar(
            torch.ones(1, dtype=torch.float64), torch.arange(x.shape[1])[:, None] * frequencies
        )
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def rows_until(case: GoldenCase, index: int, states: str) -> tuple[Tensor, Tensor]:
    """Shifted tokens and target states of everything that is committed at a round."""
    parts = []
    for earlier in range(1, index + 1):
        num_valid = case.integer(earlier, "num_valid_rows")
        parts.append(case.tensor(earlier, states)[:num_valid])
    anchor = case.tensor(index, "anchor_id").view(1)
    return torch.cat([case.tensor(index, "committed_ids")[1:], anchor]), torch.cat(parts)
