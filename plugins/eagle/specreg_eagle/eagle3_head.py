"""The EAGLE-3 head: fused target states, and a first layer that reads them beside the embedding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from specreg.checkpoint import Checkpoint
from specreg.drafters.self_feeding import DraftStates
from specreg.errors import CheckpointError
from specreg.nn.attention import Attention
from specreg.nn.decoder_layer import DecoderLayer
from specreg.nn.rotary import RotaryAngles
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.speculator import KVRows, KVView, ProposeInputs, SpeculatorContext, TargetView
from specreg.weights import Ignored, load_weights
from specreg_eagle.aux_layers import aux_layer_ids, check_projection
from specreg_eagle.eagle3_config import Eagle3Config
from specreg_eagle.tensor_names import ENDS_ABSENT, common_name, settle_attention_biases

__all__ = ["Eagle3Head", "load_eagle3"]

logger = logging.getLogger(__name__)


class Fusion(nn.Module):
    """`fc` over target states side by side, after the norms that a head may have."""

    def __init__(self, config: Eagle3Config, num_states: int) -> None:
        super().__init__()
        size, shape = config.target_hidden_size, config.shape
        self.num_states = num_states
        self.input_norm = shape.norm(num_states * size) if config.norm_before_fc else nn.Identity()
        norms = (shape.norm(size) for _ in range(num_states if config.fc_norm else 0))
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(num_states * size, shape.hidden_size, bias=False, device="meta")

    def forward(self, states: Tensor) -> Tensor:
        """`[n, num_states * target_hidden_size]` to `[n, hidden_size]`."""
        states = self.input_norm(states)
        if len(self.fc_norm) > 0:
            parts = states.chunk(self.num_states, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        fused: Tensor = self.fc(states)
        return fused


class FirstLayer(nn.Module):
    """A decoder layer whose queries, keys and values read the embedding beside the state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shape = config.shape
        self.starts_normed = config.norm_before_residual
        self.input_layernorm, self.hidden_norm = shape.norm(), shape.norm()
        self.self_attn = Attention(shape, 0, input_size=2 * shape.hidden_size)
        self.post_attention_layernorm = shape.norm()
        self.mlp = shape.mlp()

    def forward(
        self, embedded: Tensor, state: Tensor, angles: RotaryAngles, rows: KVRows, kv: KVView
    ) -> Tensor:
        """Embeddings and states, `[n, hidden_size]` each, to the stream of the same shape."""
        normed: Tensor = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        stream = normed if self.starts_normed else state
        stream = stream + self.self_attn(x, angles, rows, kv)
        result: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return result


class Eagle3Head(nn.Module):
    """States of several target layers are fused once; from then on the head feeds itself.

    Args:
        config: of the head, its biases settled.
        num_states: target states that are fused; 0 reads the target's last one as it is.
        has_masks: it has the state that stands for drafts (P-EAGLE).
        where: of the checkpoint.
        device: of the rotary frequencies.
    """

    mask_hidden: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        num_states: int,
        where: str,
        device: torch.device,
        *,
        has_masks: bool = False,
    ) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        self.ends = VocabularyEnds(
            config.vocab_size,
            config.draft_vocab_size,
            shape.hidden_size,
            where,
            logit_scale=config.logit_scale,
        )
        self.fusion = Fusion(config, num_states) if num_states else nn.Identity()
        if has_masks:
            width = num_states * config.target_hidden_size or shape.hidden_size
            self.mask_hidden = nn.Parameter(torch.empty(1, 1, width, device="meta"))
        layers = (DecoderLayer(shape, layer) for layer in range(1, shape.num_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *layers])
        self.norm = shape.norm()
        self.rotary = shape.rotary(device)

    def read_target(self, inputs: ProposeInputs) -> Tensor:
        """The target's rows as the first pass reads them, `[num_tokens, hidden_size]`."""
        states = inputs.aux_hidden_states if self.config.uses_aux_states else inputs.hidden_states
        assert states is not None
        fused: Tensor = self.fusion(states)
        return fused

    def mask_state(self) -> Tensor:
        """What a row that stands for a draft reads in the place of a state, `[1, hidden_size]`."""
        fused: Tensor = self.fusion(self.mask_hidden[0])
        return fused

    def forward(self, token_ids: Tensor, states: Tensor, rows: KVRows, kv: KVView) -> DraftStates:
        """Rows of (token of p + 1, fused or fed-back state of p), `[n]` and `[n, hidden_size]`."""
        angles = self.rotary(rows.positions)
        first, *others = self.layers
        stream = first(self.ends.embed(token_ids), states, angles, rows, kv)
        for layer in others:
            stream = layer(stream, angles, rows, kv)
        normed = self.norm(stream)
        return DraftStates(normed, normed if self.config.norm_output else stream)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits `[n, draft_vocab_size]`."""
        return self.ends.score(hidden)


def load_eagle3(
    context: SpeculatorContext, target: TargetView, *, has_masks: bool = False
) -> Eagle3Head:
    """Load a head and attach it to the target.

    Raises:
        CheckpointError: config, weights and target do not fit each other.
        TensorError: the map of its vocabulary does not fit the target's.
    """
    assert context.draft_path is not None
    checkpoint = Checkpoint(context.draft_path)
    config = Eagle3Config.read(checkpoint.config, f"{context.draft_path}/config.json")
    names = set(checkpoint.names)
    ids = _fused_ids(config, checkpoint, target)
    _check_host(context, config, ids)
    stated = config.has_attention_bias
    config = replace(
        config, shape=settle_attention_biases(config.shape, stated, names, config.where)
    )
    head = Eagle3Head(config, len(ids), context.draft_path, context.device, has_masks=has_masks)
    if "mask_hidden" in names and not has_masks:
        logger.warning(
            "%s: mask_hidden is not read, because config.json describes no head that drafts in "
            "parallel",
            context.draft_path,
        )

    def rename(name: str) -> str | Ignored | None:
        if name == "mask_hidden" and not has_masks:
            return Ignored("no token is drafted in parallel")
        return _name(name)

    load_weights(
        head,
        checkpoint,
        rename,
        absent=ENDS_ABSENT,
        file_name=_file_name,
        dtype=context.dtype,
        device=context.device,
    )
    head.ends.attach(target)
    config.report()
    return head


def _name(name: str) -> str | Ignored | None:
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    if name.startswith(("fc.", "fc_norm.", "input_norm.")):
        return f"fusion.{name}"
    return common_name(name)


def _file_name(name: str) -> str:
    return name.removeprefix("fusion.")


def _check_host(context: SpeculatorContext, config: Eagle3Config, ids: Sequence[int]) -> None:
    """Whether the states that the host was asked for, before loading, are those of the head."""
    asked = context.spec.needs_for(context.setup).aux_layer_ids
    if asked != tuple(ids):
        raise CheckpointError(
            "the target layers that an EAGLE-3 head reads depend on a depth that is not known",
            where=f"{config.where}, eagle_aux_hidden_state_layer_ids",
            got=f"{list(asked)} by the target's config.json, {list(ids)} by its layers; allowed: "
            "the same",
            fix="state the ids in the head's config.json",
        )


def _fused_ids(config: Eagle3Config, checkpoint: Checkpoint, target: TargetView) -> Sequence[int]:
    """Entries that are fused; checked against the projection and the target."""
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            "an EAGLE-3 head reads states of another width than the target's",
            where=f"{config.where}, target_hidden_size",
            got=f"{config.target_hidden_size}; allowed: the target's {target.hidden_size}",
            fix="use a head that was trained for this target",
        )
    if not config.uses_aux_states:
        if config.target_hidden_size != config.shape.hidden_size:
            raise CheckpointError(
                "an EAGLE-3 head without a projection has another width than the target",
                where=f"{config.where}, eagle_config.use_aux_hidden_state",
                got=f"false, hidden_size {config.shape.hidden_size}; allowed: the target's "
                f"{target.hidden_size}",
                fix="use a head that was trained for this target",
            )
        return ()
    ids = aux_layer_ids(config, target.num_layers)
    if "fc.weight" in checkpoint:
        width = checkpoint.shape("fc.weight")[-1]
        check_projection(width, ids, config.target_hidden_size, str(checkpoint.directory))
    if config.stated_aux_ids is None:
        logger.warning(
            "%s: the target layers that the head reads are not stated; the default %s is taken",
            config.where,
            list(ids),
        )
    return ids
