"""A pre-norm decoder layer."""

from __future__ import annotations

from torch import Tensor, nn

from specreg.nn.attention import Attention
from specreg.nn.rotary import RotaryAngles
from specreg.nn.shape import DecoderShape
from specreg.speculator import KVRows, KVView

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """`s += attention(norm(s)); s += mlp(norm(s))`, with the names of Llama-style checkpoints.

    Args:
        shape: of the decoder.
        layer: index of the layer.
        has_input_norm: whether attention reads the normalised stream.
    """

    def __init__(self, shape: DecoderShape, layer: int, *, has_input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = shape.norm() if has_input_norm else nn.Identity()
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = shape.norm()
        self.mlp = shape.mlp()

    def forward(self, stream: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView) -> Tensor:
        """`[n, hidden_size]` to the same; writes the layer's keys and values at `rows`."""
        stream = stream + self.self_attn(self.input_layernorm(stream), angles, rows, kv)
        feed_forward: Tensor = self.mlp(self.post_attention_layernorm(stream))
        return stream + feed_forward
