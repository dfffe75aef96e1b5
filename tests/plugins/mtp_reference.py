"""MTP modules written out once more, without caches and without the plugin's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Facts", "module_forward", "one_module_a_step", "recursion"]


@dataclass(frozen=True)
class Facts:
    """What a family's module is like: names in the file, and how parts are connected."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    final_norm: str | None
    head: str | None = None
    is_hidden_first: bool = False
    feeds_stream: bool = False
    zeroes_first: bool = False
    one_plus: bool = False
    post_norm: str = "post_attention_layernorm"
    rotary_dim: int | None = None
    theta: float = 10_000.0
    window: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


def rms(x: Tensor, weight: Tensor, one_plus: bool) -> Tensor:
    scale = 1 + weight if one_plus else weight
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale


def rotate(x: Tensor, positions: Tensor, width: int, theta: float) -> Tensor:
    """`x [n, heads, head_dim]`, the first `width` elements turned, half with half."""
    half = width // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half).float() * 2 / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., :half], x[..., half:width], x[..., width:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attention(
    w: Mapping[str, Tensor], facts: Facts, x: Tensor, positions: Tensor, kv: int
) -> Tensor:
    def linear(name: str, given: Tensor) -> Tensor:
        return F.linear(given, w[f"{name}.weight"], w.get(f"{name}.bias"))

    head_dim = w["k_proj.weight"].shape[0] // kv
    heads = w["o_proj.weight"].shape[1] // head_dim
    query, gate = linear("q_proj", x).unflatten(-1, (heads, -1)), None
    if query.shape[-1] == 2 * head_dim:
        query, gate = query[..., :head_dim], query[..., head_dim:]
    elif "g_proj.weight" in w:
        gate = linear("g_proj", x)[..., None]
    key, value = (linear(n, x).unflatten(-1, (kv, -1)) for n in ("k_proj", "v_proj"))
    if "q_norm.weight" in w:
        query = rms(query, w["q_norm.weight"], facts.one_plus)
        key = rms(key, w["k_norm.weight"], facts.one_plus)
    width = facts.rotary_dim or head_dim
    query, key = (rotate(part, positions, width, facts.theta) for part in (query, key))
    key, value = (part.repeat_interleave(heads // kv, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
    distance = positions[:, None] - positions[None, :]
    hidden = distance < 0
    if facts.window is not None:
        hidden |= distance >= facts.window
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
    if gate is not None:
        out = out * gate.sigmoid()
    return linear("o_proj", out.flatten(1))


def module_forward(
    weights: Mapping[str, Tensor],
    facts: Facts,
    number: int,
    embedded: Tensor,
    states: Tensor,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """All rows from position 0 on: what the head reads, and what the next pass reads."""

    def named(pattern: str) -> Tensor:
        return weights[pattern.format(number) + ".weight"]

    positions = torch.arange(len(embedded))
    if facts.zeroes_first:
        embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
    e = rms(embedded, named(facts.embedding_norm), facts.one_plus)
    u = rms(states, named(facts.hidden_norm), facts.one_plus)
    stream = torch.cat((u, e) if facts.is_hidden_first else (e, u), -1) @ named(facts.projection).T
    prefix = facts.layer.format(number)
    inner = {
        n.removeprefix(f"{prefix}."): t for n, t in weights.items() if n.startswith(f"{prefix}.")
    }
    attn = {n.removeprefix("self_attn."): t for n, t in inner.items() if n.startswith("self_attn.")}
    normed = rms(stream, inner["input_layernorm.weight"], facts.one_plus)
    stream = stream + attention(attn, facts, normed, positions, kv_heads)
    normed = rms(stream, inner[f"{facts.post_norm}.weight"], facts.one_plus)
    gate, up, down = (inner[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    stream = stream + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    scored = stream
    if facts.final_norm is not None:
        scored = rms(stream, named(facts.final_norm), facts.one_plus)
    return scored, stream if facts.feeds_stream else scored


def _head(weights: Mapping[str, Tensor], facts: Facts, number: int, shared: Tensor) -> Tensor:
    return shared if facts.head is None else weights[facts.head.format(number) + ".weight"]


def recursion(
    weights: Mapping[str, Tensor],
    facts: Facts,
    tokens: Sequence[int],
    states: Tensor,
    embedding: Tensor,
    head: Tensor,
    num_steps: int,
    kv_heads: int,
    number: int = 0,
) -> tuple[list[int], Tensor]:
    """Greedy drafts behind `tokens`, and their logits; `states` are those of all but the last."""
    ids, u = list(tokens[1:]), states
    drafts, logits = [], []
    for _ in range(num_steps):
        scored, fed = module_forward(weights, facts, number, embedding[ids], u, kv_heads)
        logits.append(scored[-1] @ _head(weights, facts, number, head).T)
        drafts.append(int(logits[-1].argmax()))
        ids.append(drafts[-1])
        u = torch.cat((u, fed[-1:]))
    return drafts, torch.stack(logits)


def one_module_a_step(
    weights: Mapping[str, Tensor],
    facts: Facts,
    tokens: Sequence[int],
    states: Tensor,
    embedding: Tensor,
    head: Tensor,
    numbers: Sequence[int],
    kv_heads: int,
) -> tuple[list[int], Tensor]:
    """The same with a module a step, each over all rows at their own positions."""
    ids, u = list(tokens[1:]), states
    drafts, logits = [], []
    for number in numbers:
        scored, u = module_forward(weights, facts, number, embedding[ids], u, kv_heads)
        logits.append(scored[-1] @ _head(weights, facts, number, head).T)
        drafts.append(int(logits[-1].argmax()))
        ids = [*ids[1:], drafts[-1]]
    return drafts, torch.stack(logits)
