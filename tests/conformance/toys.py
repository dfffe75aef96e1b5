"""An honest toy drafter, and liars: each breaks one promise that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specreg.capabilities import (
    Capabilities,
    DraftingStyle,
    DraftLogitsLayout,
    FusedSampling,
    TargetNeeds,
)
from specreg.plugin import SpeculatorSpec, hookimpl
from specreg.speculator import DraftOutput, ProposeInputs, SpeculatorBase, TargetView

CAPABILITIES = Capabilities(
    style=DraftingStyle.AUTOREGRESSIVE, supports_probabilistic=True, honors_owner_mask=True
)


class Bigrams(SpeculatorBase):
    """Drafts from a random table of what follows a token.

    `changes` are those of a kind's capabilities.
    """

    changes: ClassVar[Mapping[str, Any]] = {}

    def load_model(self, target: TargetView) -> None:
        generator = torch.Generator().manual_seed(3)
        size = target.vocab_size
        self.table = 2 * torch.randn(size, size, generator=generator)

    def weight_bytes(self) -> int:
        return self.table.nbytes

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        kept = torch.tensor(inputs.query_start_loc[1:]) - 1 - inputs.num_rejected
        position = inputs.positions[kept] + 2
        token = inputs.last_sampled.clamp(min=0)
        drafts = []
        for step in range(self.num_speculative_tokens):
            logits = self.logits(inputs, token, step)
            token = self.sample(inputs, logits, step, position + step)
            drafts.append(token)
            token = token.clamp(min=0)
        return DraftOutput(torch.stack(drafts, 1))

    def logits(self, inputs: ProposeInputs, token: Tensor, step: int) -> Tensor:
        return self.table[token]

    def sample(self, inputs: ProposeInputs, logits: Tensor, step: int, positions: Tensor) -> Tensor:
        assert self.sampler is not None
        return self.sampler.sample(logits, step, positions)

    @property
    def rank(self) -> int:
        return 0 if self.draft_logits is None else self.draft_logits.shard.shard_idx


class WritesFullRows(Bigrams):
    """Stores every request at its slot, as if the cache were replicated."""

    def sample(self, inputs, logits, step, positions):
        tokens = super().sample(inputs, logits, step, positions)
        if self.draft_logits is not None:
            cells = self.draft_logits.logits
            for row, slot in enumerate(inputs.sample_idx_mapping.tolist()):
                if 0 <= slot < len(cells):
                    cells[slot, step] = logits[row]
        return tokens


class WritesBehindTheEnd(Bigrams):
    """The same with raw addresses, as a kernel has them: no index is checked."""

    def sample(self, inputs, logits, step, positions):
        tokens = super().sample(inputs, logits, step, positions)
        if self.draft_logits is not None:
            cells = self.draft_logits.logits
            num_rows = len(cells)
            whole = cells.as_strided((num_rows + 1, *cells.shape[1:]), cells.stride())
            whole[num_rows, step] = 1.0
        return tokens


class WritesForPadding(Bigrams):
    """Row -1 is the last row, as Python counts."""

    def sample(self, inputs, logits, step, positions):
        tokens = super().sample(inputs, logits, step, positions)
        if self.draft_logits is not None and self.draft_logits.num_shards == 1:
            for row, slot in enumerate(inputs.idx_mapping.tolist()):
                if slot < 0:
                    self.draft_logits.logits[slot, step] = logits[row]
        return tokens


class DiffersOnOneRank(Bigrams):
    """The last draft of rank 1 is another one."""

    def propose(self, inputs):
        tokens = super().propose(inputs).tokens
        if self.rank == 1:
            tokens[:, -1] = (tokens[:, -1] + 1) % len(self.table)
        return DraftOutput(tokens)


class KeepsStateOfTheDead(Bigrams):
    """Counts the proposals of a slot, and goes on counting when it has changed hands."""

    def load_model(self, target):
        super().load_model(target)
        self.counts = torch.zeros(self.context.config.max_num_seqs)

    def logits(self, inputs, token, step):
        slots = inputs.sample_idx_mapping
        if step == 0:
            self.counts[slots[slots >= 0]] += 1
        logits = super().logits(inputs, token, step).clone()
        logits[:, 0] += self.counts[slots.clamp(min=0)]
        return logits


class DependsOnTheBatchRow(Bigrams):
    """Draws with the number of the batch row beside the position."""

    def sample(self, inputs, logits, step, positions):
        return super().sample(inputs, logits, step, positions + torch.arange(len(positions)))


class HasItsOwnDice(Bigrams):
    """Stores through the sampler, and then draws again by itself."""

    def sample(self, inputs, logits, step, positions):
        super().sample(inputs, logits, step, positions)
        slots = inputs.sample_idx_mapping
        own = torch.multinomial(logits.softmax(1), 1).squeeze(1)
        return torch.where(slots >= 0, own, -1)


class TakesTheArgmax(Bigrams):
    """Claims to draw from what it stores, and takes the best instead: output would be biased."""

    def sample(self, inputs, logits, step, positions):
        super().sample(inputs, logits, step, positions)
        return torch.where(inputs.sample_idx_mapping >= 0, logits.argmax(1), -1)


class StoresNothing(Bigrams):
    """Drafts without the sampler: no distribution is stored, and every draft is rejected."""

    def sample(self, inputs, logits, step, positions):
        return torch.where(inputs.sample_idx_mapping >= 0, logits.argmax(1), -1)


class CallsTheOpItself(Bigrams):
    """Fused sampling that it does not declare."""

    def sample(self, inputs, logits, step, positions):
        from specreg.kernels import draft_sample

        cache, slots = self.draft_logits, inputs.sample_idx_mapping
        return draft_sample(
            logits,
            slots,
            torch.full_like(slots, step),
            positions,
            inputs.temperature,
            inputs.seeds,
            None if cache is None else cache.view(),
            vocab_size=len(self.table),
            greedy=cache is None,
        )


class BorrowsTheCache(Bigrams):
    """Asks its sampler for what a fused sampler is lent, and declares none."""

    def sample(self, inputs, logits, step, positions):
        assert self.sampler is not None
        self.sampler.lend()
        return super().sample(inputs, logits, step, positions)


class StoresOtherLogits(Bigrams):
    """Verified with another distribution than it drew from, behind the sampler's back."""

    def sample(self, inputs, logits, step, positions):
        tokens = super().sample(inputs, logits, step, positions)
        cache = self.draft_logits
        if cache is not None:
            for row, slot in enumerate(inputs.sample_idx_mapping.tolist()):
                if cache.shard.owns(slot):
                    cache.logits[cache.shard.row(slot), step] = logits[row].roll(1)
        return tokens


class AnswersInFloats(Bigrams):
    """Tokens of a type that no host takes."""

    def propose(self, inputs):
        return DraftOutput(super().propose(inputs).tokens.float())


class TakesOtherArguments(Bigrams):
    """A method that a host cannot call."""

    def release(self, slot, generation):
        pass


class WaitsForTheDevice(Bigrams):
    """Looks at a value between two drafts."""

    changes: ClassVar = {"is_cuda_graph_safe": True}

    def propose(self, inputs):
        self.inputs = inputs
        return self.draft(inputs.num_reqs)

    def draft(self, num_reqs_padded):
        output = super().propose(self.inputs)
        assert int(output.tokens.max().item()) >= -1
        return output


class Unmasked(Bigrams):
    """Honest, without the owner mask: sharding is refused."""

    changes: ClassVar = {"honors_owner_mask": False}


class GreedyOnly(Bigrams):
    """Honest, without a distribution: there is no cache."""

    changes: ClassVar = {"supports_probabilistic": False}


class Reduced(Bigrams):
    """Honest, with a head of seven columns: each is a target id of its own."""

    changes: ClassVar = {
        "layouts": frozenset({DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB}),
        "draft_vocab_size": 7,
    }

    def load_model(self, target):
        super().load_model(target)
        self.target_ids = torch.tensor([1, 2, 4, 8, 11, 12, 16])

    def logits(self, inputs, token, step):
        return self.table[token][:, self.target_ids]


class Candidates(Bigrams):
    """Honest, scoring the four best alone."""

    changes: ClassVar = {
        "layouts": frozenset({DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K}),
        "num_candidates": 4,
    }

    def sample(self, inputs, logits, step, positions):
        scores, ids = logits.topk(4, dim=1)
        return self.sampler.sample_candidates(ids, scores, step, positions)


class SaysFullCache(Bigrams):
    """Honest about a fused sampler that writes every row: it withdraws when it is loaded."""

    changes: ClassVar = {"fused_sampling": FusedSampling.FULL_CACHE}

    def supports_batch_sharded_draft_logits(self):
        return False


class WithdrawsAtLoad(Bigrams):
    """Declares the owner mask and then does not opt in."""

    def supports_batch_sharded_draft_logits(self):
        return False


class Toys:
    """The plugin of all of them; each serves the method of its own name."""

    @hookimpl
    def specreg_speculators(self) -> list[SpeculatorSpec]:
        return [_spec(kind) for kind in [Bigrams, *_subclasses(Bigrams)]]


def _subclasses(kind: type) -> list[type[Bigrams]]:
    return sorted(kind.__subclasses__(), key=lambda each: each.__name__)


def _spec(kind: type[Bigrams]) -> SpeculatorSpec:
    return SpeculatorSpec(
        name=kind.__name__,
        methods=(kind.__name__,),
        factory=f"{__name__}:{kind.__name__}",
        capabilities=replace(CAPABILITIES, **kind.changes),
        target_needs=TargetNeeds(),
        needs_checkpoint=False,
    )


PLUGIN = Toys()
