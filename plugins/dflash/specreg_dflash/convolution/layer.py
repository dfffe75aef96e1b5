"""A decoder layer of a block whose sublayers lie between convolutions."""

from __future__ import annotations

from torch import Tensor

from specreg.speculator import KVView
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.convolution.config import ConvolutionConfig
from specreg_dflash.convolution.grouped import GroupedConvolution
from specreg_dflash.layer import BlockLayer

__all__ = ["ConvolvedLayer"]


class ConvolvedLayer(BlockLayer):
    """A `BlockLayer` that convolves what goes into attention and feed-forward, and what comes out.

    The block's own keys and values come from convolved rows; those of the context do not.

    Args:
        config, layer: as of `BlockLayer`.
        convolution: taps and groups.
    """

    def __init__(self, config: BackboneConfig, layer: int, convolution: ConvolutionConfig) -> None:
        super().__init__(config, layer)
        hidden_size = config.shape.hidden_size
        self.attention_conv = GroupedConvolution(hidden_size, convolution)
        self.mlp_conv = GroupedConvolution(hidden_size, convolution)

    def attention(self, normed: Tensor, block: Block, kv: KVView) -> Tensor:
        before, behind = self.attention_conv.kernels(normed)
        convolved = self.attention_conv.convolve(normed, before, block.num_rows)
        attended = super().attention(convolved, block, kv)
        return self.attention_conv.convolve(attended, behind, block.num_rows)

    def feed_forward(self, normed: Tensor, block: Block) -> Tensor:
        before, behind = self.mlp_conv.kernels(normed)
        convolved = self.mlp_conv.convolve(normed, before, block.num_rows)
        fed = super().feed_forward(convolved, block)
        return self.mlp_conv.convolve(fed, behind, block.num_rows)
