"""A speculator under observation: every proposal is checked as it is made, and recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from specreg.capabilities import Capabilities, DraftLogitsLayout, FusedSampling
from specreg.draft_logits import CELL_EMPTY, DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.plan import DraftLogitsPlan
from specreg.runtime.kv_pool import KVPool
from specreg.specs import SpeculatorSpec
from specreg.speculator import (
    DraftOutput,
    KVView,
    ProposeInputs,
    Speculator,
    SpeculatorContext,
    TargetView,
)
from specreg.testing.batches import permuted, with_padding
from specreg.testing.guarded_cache import GuardedCache
from specreg.testing.host_sync import HostSyncDetector
from specreg.testing.recording import Cells, Key, Proposal, RankLog
from specreg.testing.sampler_probe import SamplerProbe

__all__ = ["ObservedSpec", "ObservedSpeculator", "Twist", "observed_spec"]


class Twist(str, Enum):
    """What the host does to batches on their way in and to drafts on their way out.

    Attributes:
        NONE: nothing.
        PADDED: padding rows come before, between and behind the rows, as far as slots allow.
        REVERSED: the last row comes first.
        DROPPED: drafts are cut off behind the first 0 to K of them.
        WATCHED: nothing, but what `draft` does is watched: see `HostSyncDetector`.
    """

    NONE = "none"
    PADDED = "padded"
    REVERSED = "reversed"
    DROPPED = "dropped"
    WATCHED = "watched"


class ObservedSpeculator:
    """A `Speculator` that passes everything on to another one, and watches.

    Args:
        inner: the speculator.
        capabilities: what it declares.
        log: gives the record to write to.
        max_num_seqs: batch rows that a batch may have.

    Attributes:
        twist: see `Twist`; may change between calls.
        kv_pool, num_target_layers: where its KV lies; set by the host once there is a pool.
    """

    def __init__(
        self,
        inner: Speculator,
        capabilities: Capabilities,
        log: Callable[[], RankLog],
        max_num_seqs: int,
    ) -> None:
        self.inner = inner
        self.capabilities = capabilities
        self.kv_pool: KVPool | None = None
        self.num_target_layers = 0
        self._log = log
        self.twist = Twist.NONE
        self._max_num_seqs = max_num_seqs
        self._guard: GuardedCache | None = None
        self._probe: SamplerProbe | None = None
        self._detector = HostSyncDetector()
        self._num_proposals = 0
        self._tokens: dict[int, list[int]] = {}

    @property
    def spec(self) -> SpeculatorSpec:
        return self.inner.spec

    @property
    def draft_logits(self) -> DraftLogitsCache | None:
        return self.inner.draft_logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load_model(self, target: TargetView) -> None:
        self.inner.load_model(cast(TargetView, _QuietTarget(target, self._detector)))

    def weight_bytes(self) -> int:
        return self.inner.weight_bytes()

    def supports_batch_sharded_draft_logits(self) -> bool:
        return self.inner.supports_batch_sharded_draft_logits()

    def allocate_draft_logits(
        self, plan: DraftLogitsPlan, device: torch.device
    ) -> DraftLogitsCache | None:
        cache = self.inner.allocate_draft_logits(plan, device)
        if self.inner.draft_logits is not cache:
            line = "draft_logits is not the cache that allocate_draft_logits returned"
            self._log().violate("output", [line])
        if cache is not None:
            rank = f"rank {cache.shard.shard_idx} of {cache.shard.num_shards}"
            self._guard = GuardedCache(cache, rank)
        return cache

    def bind(self, sampler: DraftSampler, kv: KVView) -> None:
        steps = sampler.num_speculative_tokens
        self._probe = SamplerProbe(sampler, steps, self._detector.paused)
        self.inner.bind(sampler, cast(KVView, _QuietKV(kv, self._detector)))
        draft = getattr(self.inner, "draft", None)
        if draft is not None:
            vars(self.inner)["draft"] = self._detector.watching(draft)

    def release(self, req_state_idx: int) -> None:
        self.inner.release(req_state_idx)

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        probe, guard, log = self._probe, self._guard, self._log()
        assert probe is not None
        given, own = self._twisted(inputs)
        if given is not inputs:
            probe.sampler.begin(
                given.idx_mapping, given.sample_idx_mapping, given.temperature, given.seeds
            )
        probe.begin(given.num_reqs)
        if guard is not None:
            guard.begin()
        kv_before = self._kv_blocks()
        self._detector.is_on = self.twist is Twist.WATCHED
        output = self.inner.propose(given)
        shape = (given.num_reqs, probe.num_steps)
        if wrong := _shape_errors(output, shape, probe.sampler.vocab_size):
            log.violate("output", wrong)
            missing = torch.full_like(inputs.last_sampled, -1)
            return DraftOutput(missing[:, None].repeat(1, probe.num_steps))
        tokens = output.tokens
        log.violate("sync", self._detector.take())
        log.violate("kv", self._kv_errors(kv_before, given))
        if guard is not None:
            log.violate("bytes", guard.violations(given.sample_idx_mapping.tolist()))
            log.violate("door", self._door_errors(given, tokens.cpu()))
            log.violate("store", self._store_errors(given, guard.cache))
        self._record(inputs, tokens[own], probe.logits[own] if probe.num_calls else None)
        self._num_proposals += 1
        confidence = None if output.confidence is None else output.confidence[own]
        return DraftOutput(self._dropped(tokens[own]), confidence)

    def _twisted(self, inputs: ProposeInputs) -> tuple[ProposeInputs, list[int]]:
        """The batch that the speculator is given, and where the host's rows are in it."""
        num_reqs = inputs.num_reqs
        own = list(range(num_reqs))
        room = self._max_num_seqs - num_reqs
        if self.twist is Twist.PADDED and room > 0:
            return with_padding(inputs, [0, num_reqs, num_reqs // 2][:room])
        if self.twist is Twist.REVERSED:
            return permuted(inputs, own[::-1]), own[::-1]
        return inputs, own

    def _dropped(self, tokens: Tensor) -> Tensor:
        if self.twist is not Twist.DROPPED:
            return tokens
        keep = torch.arange(len(tokens), device=tokens.device) + self._num_proposals
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        return tokens.masked_fill(steps >= (keep % (tokens.shape[1] + 1)).unsqueeze(1), -1)

    def _door_errors(self, inputs: ProposeInputs, tokens: Tensor) -> list[str]:
        """Drafts that the sampler did not draw, although they are verified with what it stored."""
        assert self._probe is not None
        if self.capabilities.fused_sampling is not FusedSampling.NONE:
            return []
        samples = (inputs.sample_idx_mapping >= 0).unsqueeze(1).cpu()
        differs = samples & (tokens >= 0) & (tokens != self._probe.ids)
        lines = []
        for row, step in differs.nonzero().tolist()[:1]:
            drawn = int(self._probe.ids[row, step])
            said = "drew nothing there" if drawn < 0 else f"drew {drawn}"
            lines.append(
                f"draft {step} of slot {int(inputs.idx_mapping[row])} is {int(tokens[row, step])}, "
                f"but DraftSampler.sample {said}; fused sampling is not declared"
            )
        return lines

    def _store_errors(self, inputs: ProposeInputs, cache: DraftLogitsCache) -> list[str]:
        """Cells stored without a draw, drawn and not stored, or stored with other logits."""
        assert self._probe is not None
        if self.capabilities.fused_sampling is not FusedSampling.NONE:
            return []
        for row, slot in enumerate(inputs.sample_idx_mapping.tolist()):
            if not cache.shard.owns(slot):
                continue
            cells = cache.shard.row(slot)
            stored = cache.state[cells].cpu() != CELL_EMPTY
            drawn = self._probe.ids[row] >= 0
            if not torch.equal(stored, drawn):
                return [
                    f"slot {slot}: cells {stored.nonzero().flatten().tolist()} are stored, but "
                    f"drafts {drawn.nonzero().flatten().tolist()} were drawn by the sampler"
                ]
            kept, given = _kept_and_given(cache, cells, self._probe.logits[row])
            differs = (kept[drawn] != given[drawn]) & ~(kept[drawn].isnan() & given[drawn].isnan())
            if bool(differs.any()):
                step, column = (int(i) for i in differs.nonzero()[0])
                return [
                    f"slot {slot}, step {step}: column {column} of the cell holds other logits "
                    "than the draft was drawn from"
                ]
        return []

    def _kv_blocks(self) -> list[Tensor]:
        pool = self.kv_pool
        return [] if pool is None else [t.clone() for t in (*pool.keys, *pool.values)]

    def _kv_errors(self, before: list[Tensor], inputs: ProposeInputs) -> list[str]:
        """KV blocks of other requests, or of the target, that the proposal changed."""
        pool = self.kv_pool
        if pool is None:
            return []
        slots = inputs.idx_mapping[inputs.idx_mapping >= 0]
        own = {0, *pool.block_table[slots].flatten().tolist()}
        num_layers = len(pool.keys)
        for index, (old, new) in enumerate(zip(before, (*pool.keys, *pool.values), strict=True)):
            layer = index % num_layers
            changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
            if changed and layer < self.num_target_layers:
                return [f"propose changed KV of target layer {layer}"]
            foreign = sorted(set(changed) - own)
            if foreign:
                layer -= self.num_target_layers
                return [
                    f"propose changed KV block {foreign[0]} of draft layer {layer}: no request "
                    "of the batch has it"
                ]
        return []

    def _read(self, inputs: ProposeInputs) -> None:
        """Keep the tokens that the target has read of each slot, those rejected left out."""
        input_ids, starts = inputs.input_ids.tolist(), inputs.query_start_loc
        for row, slot in enumerate(inputs.idx_mapping.tolist()):
            end = starts[row + 1] - int(inputs.num_rejected[row])
            before = self._tokens.get(slot, [])[: int(inputs.positions[starts[row]])]
            self._tokens[slot] = [*before, *input_ids[starts[row] : end]]

    def _record(self, inputs: ProposeInputs, tokens: Tensor, logits: Tensor | None) -> None:
        log, guard = self._log(), self._guard
        slots = inputs.sample_idx_mapping.tolist()
        self._read(inputs)
        keys: list[Key | None] = []
        for row, slot in enumerate(slots):
            is_live = slot >= 0
            read = self._tokens.get(slot, [])
            tokens_so_far = (*read, int(inputs.last_sampled[row]))
            keys.append(Key(int(inputs.seeds[slot]), tokens_so_far) if is_live else None)
            if is_live:
                log.newest_logits[slot] = None if logits is None else logits[row, 0].clone()
        cells = {}
        if guard is not None:
            cache = guard.cache
            parts = (cache.logits, cache.temperature, cache.logsumexp, cache.state)
            for slot in slots:
                if cache.shard.owns(slot):
                    row = cache.shard.row(slot)
                    cells[slot] = Cells(*(part[row].clone() for part in parts))
                    if logits is None and bool(cache.state[row, 0] != CELL_EMPTY):
                        log.newest_logits[slot] = _whole(cache, row)
        log.proposals.append(Proposal(keys, slots, tokens.cpu().clone(), logits, cells))


def _kept_and_given(cache: DraftLogitsCache, row: int, full: Tensor) -> tuple[Tensor, Tensor]:
    """What a row holds, and what of the sampled logits `[steps, vocab_size]` it should hold."""
    kept = cache.logits[row]
    if cache.layout is DraftLogitsLayout.TOP_K and cache.ids is not None:
        ids = cache.ids[row].long().cpu()
        given = full.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    elif cache.layout is DraftLogitsLayout.DRAFT_VOCAB and cache.target_ids is not None:
        given = full[:, cache.target_ids.cpu()]
    else:
        given = full[:, : kept.shape[1]]
    return kept.cpu(), given.to(kept.dtype)


def _whole(cache: DraftLogitsCache, row: int) -> Tensor:
    """The logits `[vocab_size]` of a row's first cell, whatever the layout; fp32."""
    kept = cache.logits[row, 0].float().cpu()
    columns = torch.arange(len(kept))
    if cache.layout is DraftLogitsLayout.TOP_K and cache.ids is not None:
        columns = cache.ids[row, 0].long().cpu()
    elif cache.layout is DraftLogitsLayout.DRAFT_VOCAB and cache.target_ids is not None:
        columns = cache.target_ids.cpu()
    full = torch.full((cache.vocab_size,), -torch.inf)
    full[columns[columns >= 0]] = kept[columns >= 0]
    return full


def _shape_errors(output: object, shape: tuple[int, int], vocab_size: int) -> list[str]:
    tokens = getattr(output, "tokens", None)
    if not isinstance(tokens, Tensor):
        return [f"propose returned {type(output).__name__}; allowed: DraftOutput(tokens=...)"]
    if tokens.dtype != torch.int64 or tuple(tokens.shape) != shape:
        got = f"{tokens.dtype} {list(tokens.shape)}"
        return [f"propose returned tokens of {got}; allowed: torch.int64 {list(shape)}"]
    if bool(((tokens < -1) | (tokens >= vocab_size)).any()):
        worst = int(tokens.max()) if int(tokens.max()) >= vocab_size else int(tokens.min())
        return [f"propose returned token {worst}; allowed: -1 .. {vocab_size - 1}"]
    return []


class _QuietKV:
    """A `KVView` whose own work does not count as the speculator's."""

    def __init__(self, kv: KVView, detector: HostSyncDetector) -> None:
        self._kv, self._detector = kv, detector

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kv, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._detector.paused(lambda: found(*args, **kwargs))


class _QuietTarget:
    """A `TargetView` whose keys and values do not count as the speculator's either."""

    def __init__(self, target: TargetView, detector: HostSyncDetector) -> None:
        self._target, self._detector = target, detector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def kv(self, layer: int) -> _QuietKV:
        return _QuietKV(self._target.kv(layer), self._detector)


@dataclass(frozen=True)
class ObservedSpec(SpeculatorSpec):
    """A spec whose factory gives a speculator under observation.

    Attributes:
        observe: takes the speculator and what it was made with.
    """

    observe: Callable[[Speculator, SpeculatorContext], ObservedSpeculator] | None = None

    def load_factory(self) -> Callable[..., Any]:
        factory, observe = super().load_factory(), self.observe
        assert observe is not None
        return lambda context: observe(factory(context), context)


def observed_spec(
    spec: SpeculatorSpec, observe: Callable[[Speculator, SpeculatorContext], ObservedSpeculator]
) -> ObservedSpec:
    """`spec` with its speculators under observation."""
    facts = {item.name: getattr(spec, item.name) for item in fields(SpeculatorSpec)}
    return ObservedSpec(**facts, observe=observe)
