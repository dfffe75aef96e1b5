"""The modules of a Gemma 4 assistant, with the names of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specreg.nn.mlp import GatedMLP
from specreg.nn.norms import RMSNorm
from specreg.nn.rotary import Rotary, RotaryAngles
from specreg.speculator import KVRows, KVView
from specreg_mtp.gemma4_config import SLIDING, AssistantConfig
from specreg_mtp.gemma4_head import OrderedTokens, dense_logits

__all__ = ["Assistant", "AssistantStates"]

# Queries and keys are normalised a head, so that their product needs no further scale.
ATTENTION_SCALE = 1.0


class AssistantStates(NamedTuple):
    """What one pass gives.

    Attributes:
        to_score: `[n, hidden_size]`, after the final norm.
        to_feed: `[n, backbone_size]`, in the place of the target's state in the next pass.
    """

    to_score: Tensor
    to_feed: Tensor


class QueryAttention(nn.Module):
    """Attention of queries over keys and values that are already there."""

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        head_dim, bias = config.head_dims[kind], config.attention_bias
        size = config.num_heads * head_dim
        self.num_heads = config.num_heads
        self.sliding_window = config.sliding_window if kind == SLIDING else None
        self.soft_cap = config.attention_soft_cap
        self.q_proj = nn.Linear(config.hidden_size, size, bias=bias, device="meta")
        self.q_norm = RMSNorm(head_dim, config.eps)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=bias, device="meta")

    def forward(self, x: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView) -> Tensor:
        """`[n, hidden_size]` to the same, over layer 0 of `kv`."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, -1)))
        attended = kv.attend(
            0,
            angles.apply(query),
            rows,
            scale=ATTENTION_SCALE,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )
        projected: Tensor = self.o_proj(attended.flatten(-2))
        return projected


class AssistantLayer(nn.Module):
    """Norms before and after attention and feed-forward; a scalar on what comes out."""

    layer_scalar: Tensor

    def __init__(self, config: AssistantConfig, kind: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.self_attn = QueryAttention(config, kind)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.act, where=config.where
        )
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.register_buffer("layer_scalar", torch.empty(1, device="meta"))

    def forward(self, stream: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView) -> Tensor:
        """`[n, hidden_size]` to the same."""
        attended = self.self_attn(self.input_layernorm(stream), angles, rows, kv)
        stream = stream + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(stream))
        stream = stream + self.post_feedforward_layernorm(fed_forward)
        return stream * self.layer_scalar


class AssistantDecoder(nn.Module):
    """The layers and the final norm."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.layer_types = config.layer_types
        self.layers = nn.ModuleList(AssistantLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.eps)

    def forward(
        self,
        stream: Tensor,
        angles: Mapping[str, RotaryAngles],
        rows: KVRows,
        kv: Mapping[str, KVView],
    ) -> Tensor:
        """`[n, hidden_size]` to the same; angles and views by layer type."""
        for layer, kind in zip(self.layers, self.layer_types, strict=True):
            stream = layer(stream, angles[kind], rows, kv[kind])
        final: Tensor = self.norm(stream)
        return final


class Assistant(nn.Module):
    """An assistant, on the meta device until it is loaded.

    Args:
        config: its sizes.
        device: of the rotary frequencies.

    Attributes:
        rotary: by layer type.
    """

    def __init__(self, config: AssistantConfig, device: torch.device | str) -> None:
        super().__init__()
        hidden_size, backbone_size = config.hidden_size, config.backbone_size
        self.config = config
        self.pre_projection = nn.Linear(2 * backbone_size, hidden_size, bias=False, device="meta")
        self.model = AssistantDecoder(config)
        self.post_projection = nn.Linear(hidden_size, backbone_size, bias=False, device="meta")
        self.lm_head = nn.Linear(hidden_size, config.vocab_size, bias=False, device="meta")
        if config.centroids is not None:
            self.masked_embedding = OrderedTokens(
                config.centroids, config.vocab_size, hidden_size, config.where
            )
        self.rotary = {
            kind: Rotary.from_config(
                {"rope_parameters": config.ropes[kind]},
                config.head_dims[kind],
                device,
                config.where,
            )
            for kind in dict.fromkeys(config.layer_types)
        }

    def angles(self, positions: Tensor) -> dict[str, RotaryAngles]:
        """By layer type, of `positions`, int64 `[n]`."""
        return {kind: rotary(positions) for kind, rotary in self.rotary.items()}

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        angles: Mapping[str, RotaryAngles],
        rows: KVRows,
        kv: Mapping[str, KVView],
    ) -> AssistantStates:
        """One pass.

        Args:
            embedded: `[n, backbone_size]`, tokens as the target embeds them.
            states: `[n, backbone_size]`, the target's, or what the pass before gave to feed.
            angles: of the rows, by layer type.
            rows: which keys of the target each row sees.
            kv: the target's layer of each layer type, as layer 0.
        """
        stream = self.pre_projection(torch.cat((embedded, states), dim=-1))
        final = self.model(stream, angles, rows, kv)
        return AssistantStates(final, self.post_projection(final))

    def score(self, to_score: Tensor) -> Tensor:
        """Logits `[n, vocab_size]`; -inf for tokens that an ordered head leaves out."""
        head, soft_cap = self.lm_head.weight, self.config.logits_soft_cap
        if self.config.centroids is None:
            return dense_logits(to_score, head, soft_cap)
        logits: Tensor = self.masked_embedding(to_score, head, soft_cap)
        return logits
