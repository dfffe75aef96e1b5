"""A decoder layer over the rows of a block and the context before it."""

from __future__ import annotations

from torch import Tensor, nn

from specreg.nn.attention import Attention
from specreg.nn.rotary import RotaryAngles
from specreg.speculator import KVRows, KVView
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block

__all__ = ["BlockLayer"]


class BlockLayer(nn.Module):
    """`s += attention(norm(s)); s += mlp(norm(s))` over a block's rows.

    A drafter whose sublayers do more (such as convolutions around them) subclasses it, adds its
    modules and overrides `attention` and `feed_forward`; `Backbone` is told the class.

    Args:
        config: of the backbone.
        layer: index of the layer, in `KVView` too.
    """

    def __init__(self, config: BackboneConfig, layer: int) -> None:
        super().__init__()
        shape = config.shape
        self.is_causal = config.is_causal[layer]
        self.input_layernorm = shape.norm()
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = shape.norm()
        self.mlp = shape.mlp()

    def forward(self, stream: Tensor, block: Block, kv: KVView) -> Tensor:
        """`[num_reqs * block.num_rows, hidden_size]` to the same."""
        stream = stream + self.attention(self.input_layernorm(stream), block, kv)
        return stream + self.feed_forward(self.post_attention_layernorm(stream), block)

    def attention(self, normed: Tensor, block: Block, kv: KVView) -> Tensor:
        """What attention adds, `[n, hidden_size]`; writes the rows' keys and values."""
        rows = block.rows(is_causal=self.is_causal, window=self.self_attn.sliding_window)
        attended: Tensor = self.self_attn(normed, block.angles, rows, kv)
        return attended

    def feed_forward(self, normed: Tensor, block: Block) -> Tensor:
        """What the feed-forward block adds to the stream, `[n, hidden_size]`."""
        del block
        fed: Tensor = self.mlp(normed)
        return fed

    def write_context(
        self, context: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView
    ) -> None:
        """Store keys and values of context states `[n, hidden_size]`; no sublayer reads them."""
        self.self_attn.write(context, angles, rows, kv)
