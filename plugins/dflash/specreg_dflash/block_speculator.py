"""What all block drafters do: write context, run the block, and leave the choice to a subclass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from specreg.checkpoint import Checkpoint
from specreg.speculator import (
    DraftOutput,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg.weights import Ignored, load_weights, module_bytes
from specreg_dflash.backbone import Backbone, backbone_file_name, rename_backbone_tensor
from specreg_dflash.backbone_config import BackboneConfig, read_backbone
from specreg_dflash.block import Block
from specreg_dflash.config_form import ConfigForm
from specreg_dflash.context_rows import ContextRows, context_rows
from specreg_dflash.layer import BlockLayer
from specreg_dflash.mask_embedding import read_mask_embedding

__all__ = ["BlockSpeculator"]


class BlockSpeculator(SpeculatorBase):
    """Drafts a proposal from one pass over a block of rows.

    A subclass writes `propose_block`, and overrides what it has more than the backbone:
    its layers, a head of its own and the names of its tensors, keys of its config, what it keeps
    of the context.

    Attributes:
        backbone: context, layers and vocabulary ends; there after `load_model`.
        head: what `make_head` returned.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        max_num_seqs, device = context.config.max_num_seqs, context.device
        self._slots = torch.full((max_num_seqs,), -1, device=device)
        self._anchors = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    @property
    def num_block_rows(self) -> int:
        """Rows of a request: the anchor and a mask row a draft."""
        return self.num_speculative_tokens + 1

    @property
    def head_dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the head's parameters that are kept in another one than the run's."""
        return {}

    def read_config(self, form: ConfigForm) -> BackboneConfig:
        """Read the backbone's keys and the drafter's own. Raises `CheckpointError`."""
        return read_backbone(form)

    def make_layer(self, config: BackboneConfig, layer: int) -> BlockLayer:
        """A layer of the backbone, on the meta device."""
        return BlockLayer(config, layer)

    def make_head(self, config: BackboneConfig) -> nn.Module | None:
        """Modules beside the backbone, on the meta device; None without any."""
        del config
        return None

    def rename_head_tensor(self, name: str) -> str | Ignored | None:
        """The place in the head of a checkpoint's tensor; None for one of the backbone.

        `Ignored` for one that the drafter does not need.
        """
        del name
        return None

    def head_file_name(self, name: str) -> str:
        """The other way round, for errors: the file's name of a place in the head."""
        return name

    def attach_head(self, target: TargetView) -> None:
        """Once everything is loaded: check the head against the target and allocate buffers."""

    def keep_context(self, context: Tensor, rows: ContextRows) -> None:
        """Keep what `propose_block` needs of the context states `[num_tokens, hidden_size]`.

        Called by `prepare`, eagerly. What is kept must lie in buffers of fixed address.
        """

    def propose_block(self, hidden: Tensor, anchors: Tensor, block: Block) -> DraftOutput:
        """Choose the drafts; part of `draft`, and so capturable.

        Args:
            hidden: `[num_reqs, num_block_rows, hidden_size]` after the final norm.
            anchors: int64 `[num_reqs]`, the tokens of rows 0.
            block: the rows.
        """
        raise NotImplementedError

    def load_model(self, target: TargetView) -> None:
        """Load backbone and head from the draft checkpoint.

        Raises:
            CheckpointError: a checkpoint that is not complete, or not for this target.
            TensorError: a map with ids that repeat or lie outside the target's vocabulary.
        """
        context = self.context
        assert context.draft_path is not None
        checkpoint = Checkpoint(context.draft_path)
        form = ConfigForm.of(checkpoint.config, f"{context.draft_path}, config.json")
        config = self.read_config(form)
        self.backbone = Backbone(config, self.make_layer)
        self.head = self.make_head(config) or nn.Module()
        load_weights(
            nn.ModuleDict({"backbone": self.backbone, "head": self.head}),
            checkpoint,
            self._rename,
            absent={f"backbone.{name}": why for name, why in self.backbone.absent.items()},
            file_name=self._file_name,
            dtype=context.dtype,
            dtypes={f"head.{name}": dtype for name, dtype in self.head_dtypes.items()},
            device=context.device,
        )
        mask = read_mask_embedding(context.draft_path, config)
        self.backbone.attach(target, context.device, mask)
        self.target_ids = self.backbone.ends.target_ids
        self.attach_head(target)
        form.top.report()

    def _rename(self, name: str) -> str | Ignored:
        in_head = self.rename_head_tensor(name)
        if isinstance(in_head, Ignored):
            return in_head
        if in_head is not None:
            return f"head.{in_head}"
        renamed = rename_backbone_tensor(name)
        return renamed if isinstance(renamed, Ignored) else f"backbone.{renamed}"

    def _file_name(self, name: str) -> str:
        part, _, rest = name.partition(".")
        return self.head_file_name(rest) if part == "head" else backbone_file_name(rest)

    def weight_bytes(self) -> int:
        return module_bytes(self.backbone) + module_bytes(self.head)

    def prepare(self, inputs: ProposeInputs) -> None:
        """Write the context of the step's valid rows; note where each request goes on."""
        assert self.kv is not None
        features = inputs.aux_hidden_states
        if features is None:
            features = inputs.hidden_states
        assert features is not None
        rows = context_rows(inputs, self.context.max_model_len)
        context = self.backbone.context(features)
        self.backbone.write_context(context, rows.kv_rows, self.kv)
        self.keep_context(context, rows)
        num_reqs = inputs.num_reqs
        self._anchors[:num_reqs] = rows.anchors
        self._positions[:num_reqs] = rows.anchor_positions
        self._slots[:num_reqs] = inputs.sample_idx_mapping

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Run the block of every request and choose its drafts."""
        assert self.kv is not None
        anchors = self._anchors[:num_reqs_padded]
        max_model_len = self.context.max_model_len
        block = self.backbone.block(
            self._slots[:num_reqs_padded],
            self._positions[:num_reqs_padded],
            self.num_block_rows,
            max_model_len,
        )
        hidden = self.backbone(anchors, block, self.kv)
        output = self.propose_block(hidden, anchors, block)
        return output._replace(
            tokens=output.tokens.masked_fill(self.draft_positions(block) >= max_model_len, -1)
        )

    def draft_positions(self, block: Block) -> Tensor:
        """int64 `[num_reqs, num_speculative_tokens]`: where the drafts stand."""
        anchors = block.positions.view(-1, block.num_rows)[:, :1]
        steps = torch.arange(1, self.num_speculative_tokens + 1, device=anchors.device)
        return anchors + steps
