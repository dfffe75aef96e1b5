"""What a fused sampler really writes, seen before it is given a draft-logits cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsView
from specreg.draft_vocab import check_target_ids
from specreg.errors import PluginError
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
UNCHANGED = ("base_logits", "anchors", "positions", "idx_mapping", "temperature", "seeds")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    Batches are a small one, then the same padded with -1 to `max_num_seqs` rows, because a sampler
    may have another kernel for many. The padded one takes the memory of the base logits of the
    run's largest proposal, which the run needs later anyway; it has no more cells than the small.

    Attributes:
        max_num_seqs: slots of the run; no batch has more rows, and no slot is beyond.
        num_ranks: of the run.
        num_steps: K.
        w1, w2, scale, soft_cap: the Markov head.
        vocab_size: columns of the target's vocabulary.
        target_ids: of a reduced vocabulary, or None.
        dtype: of base logits and cells.
        layouts: of the cache, those that the run may get.
    """

    max_num_seqs: int
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
            max_num_seqs=context.config.max_num_seqs,
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

        Raises:
            PluginError: the sampler changes a table of the drafter, which cannot be undone.
        """
        before = self._tables()
        result = self._tried(sampler, layout, is_sharded, stores_statistics)
        for name, table in self._tables().items():
            if not torch.equal(table, before[name]):
                raise PluginError(
                    "a fused sampler has changed the drafter",
                    where=f"probe of a fused sampler, {name}",
                    got="other bits than before; allowed: writes to the cache, tokens and num_nans",
                    fix="repair the plugin, or set fused_sampling to 'off'",
                )
        return result

    def _tables(self) -> dict[str, Tensor]:
        """What tells whether a table of the drafter has changed."""
        tables = {"w1": self.w1, "w2": self.w2, "target_ids": self.target_ids}
        return {name: _digest(table) for name, table in tables.items() if table is not None}

    @property
    def num_slots(self) -> int:
        """Requests in all batches: two a rank, or those that the run can have."""
        return min(2 * self.num_ranks, self.max_num_seqs)

    def _tried(
        self,
        sampler: Sampler,
        layout: DraftLogitsLayout,
        is_sharded: bool,
        stores_statistics: bool,
    ) -> ProbeResult:
        everyone = list(range(self.num_slots))
        # A row without a request among the others; then, for a sampler of few rows, one at a time.
        few = [0, -1, *everyone[1:]][: self.max_num_seqs]
        most = few + [-1] * (self.max_num_seqs - len(few))
        for batches in ([few, most] if most != few else [few], [[slot] for slot in everyone]):
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
        before = {name: _digest(getattr(inputs, name)) for name in UNCHANGED}
        try:
            did = sampler(inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return _Run(f"it raised {type(error).__name__}: {error}", None)
        if not isinstance(did, bool):
            return _Run(f"it returned {did!r}; allowed: True or False", None)
        for name, digest in before.items():
            if not torch.equal(digest, _digest(getattr(inputs, name))):
                return _Run(f"it changed {name}", None)
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
        if not fault:
            fault = cells.unlike(slots, inputs.tokens, inputs.temperature, stores_statistics)
        return _Run(fault, tokens)

    def _cells(self, shard: Shard, layout: DraftLogitsLayout) -> SentinelCells:
        width = self.vocab_size
        if layout is DraftLogitsLayout.DRAFT_VOCAB and self.target_ids is not None:
            width = len(self.target_ids)
        return SentinelCells(
            self.num_slots,
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
        device, num_slots = self.w2.device, self.num_slots
        num_columns = (
            min(self.vocab_size, len(self.w2)) if self.target_ids is None else len(self.target_ids)
        )
        shape = (num_slots, self.num_steps, num_columns)
        generator = torch.Generator(device).manual_seed(0)
        base = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        index, slot = torch.tensor(slots), torch.arange(num_slots)
        return MarkovInputs(
            base_logits=base[index.clamp(min=0).to(device)],
            anchors=(index.clamp(min=0) % self.vocab_size).to(device),
            positions=(index.clamp(min=0) + FIRST_POSITION).to(device),
            idx_mapping=index.to(device),
            w1=self.w1,
            w2=self.w2,
            scale=self.scale,
            soft_cap=self.soft_cap,
            # Of each rank's two requests one takes the argmax and one draws.
            temperature=((slot // self.num_ranks + slot % self.num_ranks) % 2).float().to(device),
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


def _digest(tensor: Tensor) -> Tensor:
    """int64 sums of the bits over each axis but one, which takes no copy; a vector's are itself."""
    bits = tensor.view(BITS[tensor.itemsize])
    if bits.dim() == 1:
        return bits.clone()
    axes = range(bits.dim())
    return torch.cat([bits.sum([a for a in axes if a != axis], dtype=torch.int64) for axis in axes])
