"""The backbone of block drafters: the target's states as context, a block of rows as queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specreg.errors import CheckpointError
from specreg.nn.rotary import Rotary
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.speculator import KVRows, KVView, TargetView
from specreg.weights import Ignored
from specreg_dflash.backbone_config import BackboneConfig
from specreg_dflash.block import Block
from specreg_dflash.layer import BlockLayer
from specreg_dflash.mask_embedding import MASK_EMBEDDING, MASK_TOKEN

__all__ = ["Backbone", "backbone_file_name", "rename_backbone_tensor"]

ENDS = "ends."
_PREFIXES = (
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)


def rename_backbone_tensor(name: str) -> str | Ignored:
    """The place in `Backbone` of a checkpoint's tensor, for `specreg.weights.load_weights`."""
    name = name.removeprefix("model.")
    if name == "t2d":
        return Ignored("training reads it: it is d2t the other way round")
    if name in (MASK_EMBEDDING, MASK_TOKEN):
        return Ignored("read by itself: see mask_embedding.py")
    if name in VocabularyEnds.absent:
        return ENDS + name
    for prefix, ours in _PREFIXES:
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    return name.replace(".self_attn.attention_sink_bias", ".self_attn.sinks")


def backbone_file_name(name: str) -> str:
    """The other way round, for errors: the usual name in files of a place in `Backbone`."""
    return name.removeprefix(ENDS).replace(".self_attn.sinks", ".self_attn.attention_sink_bias")


class Backbone(nn.Module):
    """Context states to keys and values, and a block's rows to hidden states and logits.

    The context of a token depends on the target's states at its own position alone; it meets the
    block's rows in attention and nowhere else.

    Args:
        config: sizes and choices.
        make_layer: the class of its layers, or a function `(config, layer index)`.
    """

    rotary: Rotary

    def __init__(
        self,
        config: BackboneConfig,
        make_layer: Callable[[BackboneConfig, int], BlockLayer] = BlockLayer,
    ) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        if config.aux_layer_ids:
            width = len(config.aux_layer_ids) * config.target_hidden_size
            self.fc: nn.Module = nn.Linear(width, shape.hidden_size, bias=False, device="meta")
        else:
            self.fc = nn.Identity()
        self.hidden_norm = shape.norm()
        self.layers = nn.ModuleList(make_layer(config, i) for i in range(shape.num_layers))
        self.norm = shape.norm()
        self.ends = VocabularyEnds(
            config.vocab_size, config.draft_vocab_size, shape.hidden_size, config.where
        )
        self.mask_embedding = torch.empty(0)
        self.rotary = shape.rotary("cpu")

    @property
    def absent(self) -> Mapping[str, str]:
        """Parameters that a checkpoint may lack, for `load_weights`, each with the reason."""
        return {
            ENDS + name: reason
            for name, reason in VocabularyEnds.absent.items()
            if not (name == "lm_head.weight" and self.config.has_own_head)
        }

    def attach(self, target: TargetView, device: torch.device, mask: Tensor | None = None) -> None:
        """Once weights are loaded: check them against the target, and share what they lack.

        Args:
            target: the target.
            device: of the weights.
            mask: `[hidden_size]`, stands on mask rows; None takes the mask token's embedding.

        Raises:
            CheckpointError: a drafter for another target, or without what cannot be shared.
            TensorError: a map with ids that repeat or lie outside the target's vocabulary.
        """
        self._check_target(target)
        self.ends.attach(target)
        self.rotary = self.config.shape.rotary(device)
        if mask is None:
            mask = self._embed_mask(target, device)
        self.mask_embedding = mask.to(device, self.norm.weight.dtype) * self.config.embedding_scale

    def context(self, features: Tensor) -> Tensor:
        """Context states `[n, hidden_size]` of the target's states.

        Args:
            features: `[n, num_taps * target_hidden_size]`, taps ascending; or the target's last
                hidden states `[n, hidden_size]` for a drafter without taps.
        """
        normed: Tensor = self.hidden_norm(self.fc(features))
        return normed

    def write_context(self, context: Tensor, rows: KVRows, kv: KVView) -> None:
        """Store every layer's keys and values of context states `[n, hidden_size]` at `rows`."""
        angles = self.rotary(rows.positions)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            layer.write_context(context, angles, rows, kv)

    def block(
        self, slots: Tensor, anchor_positions: Tensor, num_rows: int, max_model_len: int
    ) -> Block:
        """The rows of a pass; see `Block`."""
        return Block(slots, anchor_positions, num_rows, max_model_len, self.rotary)

    def forward(self, anchors: Tensor, block: Block, kv: KVView) -> Tensor:
        """Run the block: each request's anchor, then mask rows.

        Their keys and values go to `kv` at their positions; the next round's context and block
        write over all of them.

        Args:
            anchors: int64 `[num_reqs]`, token ids; any valid one where the block is inert.
            block: its rows.
            kv: keys and values of the layers.

        Returns:
            `[num_reqs, block.num_rows, hidden_size]` after the final norm.
        """
        embedded = self.ends.embed(anchors) * self.config.embedding_scale
        masks = self.mask_embedding.expand(len(anchors), block.num_rows - 1, -1)
        stream = torch.cat((embedded[:, None], masks), dim=1).flatten(0, 1)
        for layer in self.layers:
            stream = layer(stream, block, kv)
        normed: Tensor = self.norm(stream)
        return normed.view(len(anchors), block.num_rows, -1)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits `[..., draft_vocab_size]` of `hidden [..., hidden_size]`, equal on all ranks."""
        logits = self.ends.score(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def _check_target(self, target: TargetView) -> None:
        config = self.config
        problems = []
        if config.target_hidden_size != target.hidden_size:
            problems.append(
                ("target_hidden_size", config.target_hidden_size, f"{target.hidden_size}")
            )
        if not config.aux_layer_ids and config.shape.hidden_size != target.hidden_size:
            # Nothing projects the target's last hidden state.
            problems.append(("hidden_size", config.shape.hidden_size, f"{target.hidden_size}"))
        if config.num_target_layers not in (None, target.num_layers):
            problems.append(("num_target_layers", config.num_target_layers, f"{target.num_layers}"))
        if config.aux_layer_ids and config.aux_layer_ids[-1] > target.num_layers:
            last = config.aux_layer_ids[-1]
            problems.append(("last tapped layer", last, f"at most {target.num_layers}"))
        for name, got, allowed in problems:
            raise CheckpointError(
                "the drafter was made for another target",
                where=f"{config.where}, {name}",
                got=f"{got}; allowed: {allowed}, as the target has it",
                fix="use a drafter that was trained for this target",
            )

    def _embed_mask(self, target: TargetView, device: torch.device) -> Tensor:
        num_rows = target.vocab_size if self.ends.shares_embedding else self.config.vocab_size
        if self.config.mask_token_id >= num_rows:
            raise CheckpointError(
                "the mask token of a drafter has no embedding",
                where=f"{self.config.where}, mask_token_id",
                got=f"{self.config.mask_token_id}; allowed: below {num_rows}, or a file "
                "mask_embedding.safetensors beside the weights",
                fix="use the config.json that belongs to the weights",
            )
        ids = torch.tensor([self.config.mask_token_id], device=device)
        return self.ends.embed(ids)[0]
