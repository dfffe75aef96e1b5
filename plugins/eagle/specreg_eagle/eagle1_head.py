"""The EAGLE-1 head: one projection and a decoder without norms at its ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from specreg.checkpoint import Checkpoint
from specreg.drafters.self_feeding import DraftStates
from specreg.errors import CheckpointError
from specreg.nn.decoder_layer import DecoderLayer
from specreg.nn.vocabulary_ends import VocabularyEnds
from specreg.speculator import KVRows, KVView, ProposeInputs, SpeculatorContext, TargetView
from specreg.weights import Ignored, load_weights
from specreg_eagle.eagle1_config import Eagle1Config
from specreg_eagle.tensor_names import ENDS_ABSENT, common_name, settle_attention_biases

__all__ = ["Eagle1Head", "load_eagle1"]

RENAMED: Mapping[str, str] = MappingProxyType(
    {"eagle_linear.weight": "fc.weight", "eagle_linear.bias": "fc.bias"}
)


class Eagle1Head(nn.Module):
    """`z = layers(fc([embedding; state]))`; `z` is scored by the target's head and fed back.

    Args:
        config: of the head, its biases settled.
        num_columns: of what scores: the target's tokens.
        where: of the checkpoint.
        device: of the rotary frequencies.
    """

    def __init__(
        self, config: Eagle1Config, num_columns: int, where: str, device: torch.device
    ) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        width = shape.hidden_size
        self.ends = VocabularyEnds(
            config.vocab_size, num_columns, width, where, logit_scale=config.logit_scale
        )
        self.fc = nn.Linear(2 * width, width, bias=bool(config.fc_bias), device="meta")
        self.layers = nn.ModuleList(
            DecoderLayer(shape, layer, has_input_norm=layer > 0 or config.has_outer_norms)
            for layer in range(shape.num_layers)
        )
        self.norm = shape.norm() if config.has_outer_norms else nn.Identity()
        self.rotary = shape.rotary(device)

    def read_target(self, inputs: ProposeInputs) -> Tensor:
        """The target's states `[num_tokens, hidden_size]` after its final norm, as they are."""
        assert inputs.hidden_states is not None
        return inputs.hidden_states

    def forward(self, token_ids: Tensor, states: Tensor, rows: KVRows, kv: KVView) -> DraftStates:
        """Rows of (token of p + 1, state of p), `[n]` and `[n, hidden_size]`."""
        stream = self.fc(torch.cat([self.ends.embed(token_ids), states], dim=-1))
        angles = self.rotary(rows.positions)
        for layer in self.layers:
            stream = layer(stream, angles, rows, kv)
        stream = self.norm(stream)
        return DraftStates(stream, stream)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab_size]`."""
        return self.ends.score(hidden)


def load_eagle1(context: SpeculatorContext, target: TargetView) -> Eagle1Head:
    """Load a head and attach it to the target. Raises `CheckpointError`, `TensorError`."""
    assert context.draft_path is not None
    checkpoint = Checkpoint(context.draft_path)
    config = Eagle1Config.read(checkpoint.config, f"{context.draft_path}/config.json")
    shape = config.shape
    if shape.hidden_size != target.hidden_size:
        raise CheckpointError(
            "an EAGLE-1 head has another width than the target",
            where=config.reader.where,
            got=f"hidden_size {shape.hidden_size}; allowed: the target's {target.hidden_size}",
            fix="use a head that was trained for this target",
        )
    names = set(checkpoint.names)
    config = replace(
        config,
        fc_bias=_fc_bias(config, names),
        shape=settle_attention_biases(shape, config.has_attention_bias, names, config.reader.where),
    )
    # The head is the target's, all of it, unless the file has one of its own.
    num_columns = config.vocab_size if "lm_head.weight" in names else target.vocab_size
    head = Eagle1Head(config, num_columns, context.draft_path, context.device)
    load_weights(
        head, checkpoint, _name, absent=ENDS_ABSENT, dtype=context.dtype, device=context.device
    )
    head.ends.attach(target)
    config.reader.report()
    return head


def _name(name: str) -> str | Ignored | None:
    if name == "d2t":  # scores are the target's, column by column: there is no place for a map
        return name
    return common_name(RENAMED.get(name, name))


def _fc_bias(config: Eagle1Config, names: set[str]) -> bool:
    """Whether the file has one; what the config says must not contradict it.

    Without the key the research code takes True, whatever the file holds: then the file decides.
    """
    has_bias = bool(names & {"fc.bias", "eagle_linear.bias"})
    if config.fc_bias is not None and config.fc_bias != has_bias:
        raise CheckpointError(
            "an EAGLE-1 head's config and weights contradict each other",
            where=f"{config.reader.where}, key 'bias'",
            got=f"{config.fc_bias}, and the file has {'an' if has_bias else 'no'} fc.bias; "
            f"allowed: {has_bias}",
            fix="correct the key, which concerns the projection fc alone",
        )
    return has_bias
