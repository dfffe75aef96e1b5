"""What a fused sampler really writes, seen before it is given a draft-logits cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsView
from specreg.draft_vocab import check_target_ids
from specreg.ownership import Shard
from specreg.speculator import SpeculatorContext
from specreg_dspark.dspark_config import DSparkConfig
from specreg_dspark.markov_head import MarkovHead
from specreg_dspark.markov_inputs import MarkovInputs
from specreg_dspark.sentinel_cells import SentinelCells

__all__ = ["Probe", "ProbeResult", "Sampler"]

Sampler = Callable[[MarkovInputs], bool]

UNDRAWN = -2
FIRST_POSITION = 7


@dataclass(frozen=True)
class ProbeResult:
    """What a sampler does to a cache of one kind.

    Attributes:
        fault: what it did that it may not, in words; empty for nothing.
        has_sampled: it answered True. One that has not is not known to be safe.
    """

    fault: str
    has_sampled: bool


@dataclass(frozen=True)
class Probe:
    """Runs a sampler on slots 0 .. 2 * num_ranks - 1, for every rank in turn.

    Every rank does it for all ranks, so all come to the same conclusion. Reads on the host.

    Attributes:
        num_ranks: of the run.
        num_steps: K.
        w1, w2, scale, soft_cap: the Markov head.
        vocab_size: columns of the target's vocabulary.
        target_ids: of a reduced vocabulary, or None.
        dtype: of base logits and cells.
        layouts: of the cache, those that the run may get.
    """

    num_ranks: int
    num_steps: int
    w1: Tensor
    w2: Tensor
    scale: float
    soft_cap: float | None
    vocab_size: int
    target_ids: Tensor | None
    dtype: torch.dtype
    layouts: tuple[DraftLogitsLayout, ...]

    @classmethod
    def of_head(
        cls,
        context: SpeculatorContext,
        config: DSparkConfig,
        head: MarkovHead,
        *,
        vocab_size: int,
        target_ids: Tensor | None,
    ) -> Probe:
        """With the tables of a loaded drafter.

        Args:
            context: of the speculator.
            config: of the drafter.
            head: loaded.
            vocab_size: columns of the target's vocabulary.
            target_ids: integers `[draft_vocab_size]` of a reduced vocabulary, or None.
        """
        speculative, wanted = context.config.speculative, context.config.draft_logits_layout
        assert speculative is not None
        assert speculative.num_speculative_tokens is not None
        w2 = head.markov_w2.weight
        if target_ids is not None:
            target_ids = check_target_ids(target_ids, vocab_size=vocab_size, device=w2.device)
        written = sorted(context.capabilities.layouts, key=lambda layout: layout.value)
        return cls(
            num_ranks=context.config.tensor_parallel_size,
            num_steps=speculative.num_speculative_tokens,
            w1=head.markov_w1.weight,
            w2=w2,
            scale=config.backbone.logit_scale,
            soft_cap=config.soft_cap,
            vocab_size=vocab_size,
            target_ids=target_ids,
            dtype=context.dtype,
            layouts=tuple(layout for layout in written if wanted in ("auto", layout.value)),
        )

    @torch.no_grad()
    def __call__(
        self,
        sampler: Sampler,
        layout: DraftLogitsLayout,
        *,
        is_sharded: bool,
        stores_statistics: bool,
    ) -> ProbeResult:
        """Try a sampler with a cache of one layout.

        Args:
            sampler: what the factory returned.
            layout: of the cache.
            is_sharded: whether the cache has the rows of one rank, or all.
            stores_statistics: what the sampler declares.
        """
        everyone = list(range(2 * self.num_ranks))
        # A row without a request among the others; then, for a sampler of few rows, one at a time.
        for batches in ([[0, -1, *everyone[1:]]], [[slot] for slot in everyone]):
            has_sampled = False
            for slots in batches:
                run = self._ranks(sampler, layout, slots, is_sharded, stores_statistics)
                has_sampled |= run.tokens is not None
                if run.fault:
                    return ProbeResult(run.fault, has_sampled)
            if has_sampled:
                return ProbeResult("", True)
        return ProbeResult("", False)

    def _ranks(
        self,
        sampler: Sampler,
        layout: DraftLogitsLayout,
        slots: list[int],
        is_sharded: bool,
        stores_statistics: bool,
    ) -> _Run:
        """A batch as every rank in turn, once whole and once without what the rank owns."""
        first: _Run | None = None
        for shard in self._shards(is_sharded):
            others = [-1 if shard.owns(slot) else slot for slot in slots]
            whole = self._run(sampler, shard, layout, slots, stores_statistics)
            rest = self._run(sampler, shard, layout, others, stores_statistics)
            for run in (whole, rest):
                if run.fault:
                    return run
            if (whole.tokens is None) != (rest.tokens is None):
                return replace(whole, fault="its answer depends on which rows are live")
            first = first or whole
            if whole.tokens != first.tokens:
                rank = f"rank {shard.shard_idx} of {shard.num_shards}"
                return replace(whole, fault=f"{rank} draws or declines otherwise than rank 0")
        assert first is not None
        return first

    def _shards(self, is_sharded: bool) -> list[Shard]:
        if not is_sharded:
            return [Shard()]
        return [Shard(self.num_ranks, rank) for rank in range(self.num_ranks)]

    def _run(
        self,
        sampler: Sampler,
        shard: Shard,
        layout: DraftLogitsLayout,
        slots: list[int],
        stores_statistics: bool,
    ) -> _Run:
        cells = self._cells(shard, layout)
        inputs = self._inputs(cells.view, slots)
        base = inputs.base_logits.clone()
        try:
            did = sampler(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return _Run(f"it raised {type(error).__name__}: {error}", None)
        if not isinstance(did, bool):
            return _Run(f"it returned {did!r}; allowed: True or False", None)
        if not torch.equal(base, inputs.base_logits):
            return _Run("it changed base_logits", None)
        if not did:
            fault = cells.touched([])
            if not fault and bool((inputs.tokens != UNDRAWN).any()):
                fault = "it wrote tokens"
            if not fault and inputs.num_nans is not None and bool(inputs.num_nans.any()):
                fault = "it wrote num_nans"
            return _Run(f"{fault}, and answered False" if fault else "", None)
        fault = cells.touched(slots) or cells.unwritten(slots, stores_statistics)
        tokens: list[list[int]] = inputs.tokens.tolist()
        for slot, drawn in zip(slots, tokens, strict=True):
            lowest, highest = (-1, -1) if slot < 0 else (0, self.vocab_size - 1)
            if not fault and not all(lowest <= token <= highest for token in drawn):
                fault = f"it drew {drawn} for slot {slot}; allowed: {lowest} to {highest}"
        return _Run(fault, tokens)

    def _cells(self, shard: Shard, layout: DraftLogitsLayout) -> SentinelCells:
        width = self.vocab_size
        if layout is DraftLogitsLayout.DRAFT_VOCAB and self.target_ids is not None:
            width = len(self.target_ids)
        return SentinelCells(
            2 * self.num_ranks,
            shard,
            layout,
            width,
            self.dtype,
            self.num_steps,
            self.vocab_size,
            self.target_ids,
            self.w2.device,
        )

    def _inputs(self, view: DraftLogitsView, slots: list[int]) -> MarkovInputs:
        device, num_slots = self.w2.device, 2 * self.num_ranks
        num_columns = (
            min(self.vocab_size, len(self.w2)) if self.target_ids is None else len(self.target_ids)
        )
        shape = (num_slots, self.num_steps, num_columns)
        generator = torch.Generator(device).manual_seed(0)
        base = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        index = torch.tensor(slots)
        return MarkovInputs(
            base_logits=base[index.clamp(min=0).to(device)],
            anchors=(index.clamp(min=0) % self.vocab_size).to(device),
            positions=(index.clamp(min=0) + FIRST_POSITION).to(device),
            idx_mapping=index.to(device),
            w1=self.w1,
            w2=self.w2,
            scale=self.scale,
            soft_cap=self.soft_cap,
            # One request takes the argmax, the next one draws.
            temperature=(torch.arange(num_slots) % 2).float().to(device),
            seeds=torch.arange(num_slots, device=device),
            cache=view,
            vocab_size=self.vocab_size,
            target_ids=self.target_ids,
            greedy=False,
            num_nans=torch.zeros(num_slots, dtype=torch.int32, device=device),
            tokens=torch.full((len(slots), self.num_steps), UNDRAWN, device=device),
        )


@dataclass(frozen=True)
class _Run:
    """One call: what was wrong, and the tokens of one that answered True."""

    fault: str
    tokens: list[list[int]] | None
