"""The speculator `gemma4`: K passes at one position, over the target's keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.checkpoint import Checkpoint
from specreg.errors import CheckpointError
from specreg.speculator import (
    DraftOutput,
    KVRows,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg.weights import module_bytes
from specreg_mtp.gemma4_checkpoint import load_assistant, read_config, suppressed_tokens
from specreg_mtp.gemma4_modules import Assistant
from specreg_mtp.gemma4_sharing import SharedLayer, shared_layers

__all__ = ["Gemma4Speculator"]


class Gemma4Speculator(SpeculatorBase):
    """Drafts K tokens from a request's last valid row alone.

    P is the position of that row: the target has read it, and its newest token is at P + 1. Every
    pass stands at position P and sees the target's keys up to P. The first reads the newest token
    and the target's state of P; each further one the draft and the state that the pass before it
    gave. Nothing is written but drafts, so there is nothing to prefill and nothing to take back.

    Attributes:
        assistant: the loaded model; None before `load_model`.
        shared_layers: the target's layer that each of its layer types reads.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        max_num_seqs, device = context.config.max_num_seqs, context.device
        self._slots = torch.full((max_num_seqs,), -1, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._states = torch.empty(0)
        self.assistant: Assistant | None = None
        self.shared_layers: dict[str, SharedLayer] = {}
        self._suppressed: Tensor | None = None
        self._target: TargetView | None = None

    def load_model(self, target: TargetView) -> None:
        """Load the assistant; find the layers of the target that it reads."""
        context = self.context
        assert context.draft_path is not None
        checkpoint = Checkpoint(context.draft_path)
        config = read_config(checkpoint)
        for what, key, own, wanted in (
            ("hidden size", "backbone_hidden_size", config.backbone_size, target.hidden_size),
            ("vocabulary", "text_config.vocab_size", config.vocab_size, target.vocab_size),
        ):
            if own != wanted:
                raise CheckpointError(
                    f"the assistant was made for a target of another {what}",
                    where=f"{config.where}, key {key!r}",
                    got=f"{own}; allowed: the target's {wanted}",
                    fix="use the assistant that was trained for this target",
                )
        self.shared_layers = shared_layers(config, target.config)
        self._suppressed = suppressed_tokens(checkpoint, config.vocab_size, context.device)
        self.assistant = load_assistant(
            checkpoint, config, dtype=context.dtype, device=context.device
        )
        self._target = target
        self._states = torch.zeros(
            len(self._slots), config.backbone_size, dtype=context.dtype, device=context.device
        )

    def weight_bytes(self) -> int:
        """Bytes of the assistant; the embedding is the target's."""
        assert self.assistant is not None
        return module_bytes(self.assistant)

    def prepare(self, inputs: ProposeInputs) -> None:
        """Keep what the last valid row of each request holds."""
        assert inputs.hidden_states is not None
        num_reqs = inputs.num_reqs
        last_rows = inputs.query_start_loc_on_device()[1:] - 1 - inputs.num_rejected
        samples = inputs.sample_idx_mapping >= 0
        self._slots[:num_reqs] = inputs.sample_idx_mapping
        self._positions[:num_reqs] = inputs.positions[last_rows]
        self._token_ids[:num_reqs] = torch.where(samples, inputs.last_sampled, 0).clamp(min=0)
        self._states[:num_reqs] = inputs.hidden_states[last_rows]

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Run K passes of one row a request."""
        assert self.assistant is not None
        assert self._target is not None
        assert self.sampler is not None
        slots, last, token_ids, states = (
            kept[:num_reqs_padded]
            for kept in (self._slots, self._positions, self._token_ids, self._states)
        )
        is_beyond = last >= self.context.max_model_len
        rows = KVRows.causal(
            slots.masked_fill(is_beyond, -1), last, tuple(range(num_reqs_padded + 1))
        )
        kv = {kind: self._target.kv(layer.index) for kind, layer in self.shared_layers.items()}
        angles = self.assistant.angles(last)
        drafts: list[Tensor] = []
        for step in range(self.num_speculative_tokens):
            to_score, states = self.assistant(
                self._target.embed(token_ids), states, angles, rows, kv
            )
            drafts.append(self.sampler.sample(self.score(to_score), step, last + step + 2))
            token_ids = drafts[-1].clamp(min=0)
        return DraftOutput(torch.stack(drafts, dim=1).masked_fill(is_beyond[:, None], -1))

    def score(self, to_score: Tensor) -> Tensor:
        """Logits `[n, vocab_size]` of `[n, hidden_size]` states, -inf for suppressed tokens."""
        assert self.assistant is not None
        logits = self.assistant.score(to_score)
        if self._suppressed is None:
            return logits
        return logits.index_fill_(1, self._suppressed, -torch.inf)
