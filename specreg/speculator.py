"""The protocol between a speculator and whatever engine hosts it.

A host calls, in this order: the spec's factory with a `SpeculatorContext`; `load_model`;
`supports_batch_sharded_draft_logits`; `allocate_draft_logits` with the final plan; `bind` with the
`DraftSampler` and `KVView` that the host owns; then `propose` once a step and `release` once a
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specreg.capabilities import Capabilities
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels.common.upload import upload
from specreg.plugin import DraftSetup, SpeculatorSpec

if TYPE_CHECKING:
    from specreg.config import EngineConfig
    from specreg.draft_sampler import DraftSampler
    from specreg.policy import DraftLogitsPlan
    from specreg.registry import Registry

__all__ = [
    "DraftOutput",
    "KVRows",
    "KVView",
    "ProposeInputs",
    "Speculator",
    "SpeculatorBase",
    "SpeculatorContext",
    "TargetView",
]


class KVRows(NamedTuple):
    """Addresses of packed tokens in a `KVView`: one (slot, position) a token.

    Attributes:
        slots: int64 `[num_tokens]`, request state index; -1 marks a padding token: nothing is
            written for it and its attention output is zero.
        positions: int64 `[num_tokens]`, position of the token in its request.
        kv_lens: int64 `[num_tokens]`, keys visible to the token, itself included: `positions + 1`
            for causal attention, the end of the block for a non-causal one.
        query_start_loc: offsets `0 .. num_tokens` of the requests, on the host, when tokens of one
            request lie together; a host may use it to group work. Never changes a result.
    """

    slots: Tensor
    positions: Tensor
    kv_lens: Tensor
    query_start_loc: tuple[int, ...] | None = None

    @classmethod
    def causal(
        cls, slots: Tensor, positions: Tensor, query_start_loc: tuple[int, ...] | None = None
    ) -> KVRows:
        """Rows whose tokens see everything up to and including themselves."""
        return cls(slots, positions, positions + 1, query_start_loc)


class KVView(Protocol):
    """Keys and values of a speculator's layers, owned and placed by the host.

    A position that is written again (after a rejection) is simply overwritten.
    """

    def write(self, layer: int, rows: KVRows, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value`, each `[num_tokens, num_kv_heads, head_dim]`, at `rows`."""
        ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        rows: KVRows,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of `query [num_tokens, num_heads, head_dim]` over the stored keys of its slot.

        Args:
            layer: index of the attention layer.
            query: after rotary; grouped heads share a key/value head.
            rows: addresses of the queries; `rows.kv_lens` bounds the visible keys.
            scale: factor on `query @ key`.
            sliding_window: newest keys visible to a query at its position, itself included.
            soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
            sinks: `[num_heads]` logits that join each softmax without a value.

        Returns:
            `[num_tokens, num_heads, head_dim]` in the query's dtype; zero for padding tokens.
        """
        ...


class TargetView(Protocol):
    """What a speculator may ask of the target model.

    Attributes:
        config: the target's `config.json` as a mapping.
        vocab_size, hidden_size, num_layers: sizes of the target.
        dtype, device: of its weights.
    """

    config: Mapping[str, Any]
    vocab_size: int
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings `[n, hidden_size]` of `token_ids [n]`."""
        ...

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[n, vocab_size]`, bit-identical on all ranks (a collective when tp > 1)."""
        ...

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        """This rank's columns `[n, padded_vocab_size / tp_size]`, without a collective."""
        ...

    def kv(self, layer: int) -> KVView:
        """Read-only view of the target's KV at `layer`; `write` raises."""
        ...


@dataclass(frozen=True)
class SpeculatorContext:
    """What a speculator's factory gets.

    Attributes:
        spec: the spec whose factory is called.
        config: the whole engine configuration.
        setup: what its declarations depend on.
        draft_path: the draft checkpoint's directory, resolved; the target's for a speculator whose
            weights lie there; None when there is none.
        max_model_len: positions a request may have; drafting writes no KV at or beyond it.
        device, dtype: where and in what its weights are wanted.
        registry: what is installed, for plugins with hooks of their own; None is the process's.
    """

    spec: SpeculatorSpec
    config: EngineConfig
    setup: DraftSetup
    draft_path: str | None
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    registry: Registry | None = None

    @property
    def options(self) -> Any:
        """The spec's `options_model`, validated; None when it has none."""
        return self.setup.options

    @property
    def draft_config(self) -> Mapping[str, Any]:
        """The draft checkpoint's `config.json`; empty when there is no checkpoint."""
        return self.setup.draft_config

    @property
    def capabilities(self) -> Capabilities:
        """What the spec declares for this setup."""
        return self.spec.capabilities_for(self.setup)


@dataclass
class ProposeInputs:
    """One step's batch after verification, packed. Tensors are on the device unless said otherwise.

    Attributes:
        input_ids: int64 `[num_tokens]`, what the target has just read, drafts included.
        positions: int64 `[num_tokens]`.
        query_start_loc: offsets of the requests in the packed tokens, `num_reqs + 1` host integers.
        idx_mapping: int64 `[num_reqs]`, batch row -> request state index; -1 is a padding row, of
            at least one token that stands for nothing.
        sample_idx_mapping: the same, but -1 where a request samples nothing this step.
        num_sampled: int64 `[num_reqs]`, tokens emitted by verification; 0 in mid-prefill.
        num_rejected: int64 `[num_reqs]`, trailing packed tokens that verification rejected.
        last_sampled: int64 `[num_reqs]`, newest emitted token; undefined where `num_sampled` is 0.
        next_prefill_tokens: int64 `[lookahead, num_reqs]`, prompt tokens after the chunk; -1 past
            the prompt.
        num_draft_tokens: int64 `[num_reqs]`, drafts wanted, 0..K; 0 keeps the draft KV in sync.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means greedy.
        seeds: int64 `[max_num_seqs]` by slot.
        hidden_states: `[num_tokens, hidden_size]` of `TargetNeeds`; None if not asked for.
        aux_hidden_states: `[num_tokens, num_aux * hidden_size]`, entry ids ascending; or None.
        token_history: int64 `[num_reqs, max_len]`, -1 padded, emitted tokens included; or None.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: tuple[int, ...]
    idx_mapping: Tensor
    sample_idx_mapping: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    last_sampled: Tensor
    next_prefill_tokens: Tensor
    num_draft_tokens: Tensor
    temperature: Tensor
    seeds: Tensor
    hidden_states: Tensor | None = None
    aux_hidden_states: Tensor | None = None
    token_history: Tensor | None = None

    @property
    def num_reqs(self) -> int:
        """Batch rows, padding rows included."""
        return len(self.query_start_loc) - 1

    @property
    def num_tokens(self) -> int:
        """Packed tokens."""
        return self.query_start_loc[-1]

    def query_start_loc_on_device(self) -> Tensor:
        """`query_start_loc` as int64 `[num_reqs + 1]`, copied without host synchronisation."""
        return upload(torch.tensor(self.query_start_loc), self.input_ids.device)


class DraftOutput(NamedTuple):
    """A proposal.

    Attributes:
        tokens: int64 `[num_reqs, num_speculative_tokens]`; -1 where there is no draft.
        confidence: fp32 of the same shape, probability that the draft is accepted; None if unknown.
    """

    tokens: Tensor
    confidence: Tensor | None = None


@runtime_checkable
class Speculator(Protocol):
    """The drafter of speculative decoding, as an engine sees it."""

    spec: SpeculatorSpec
    draft_logits: DraftLogitsCache | None

    def load_model(self, target: TargetView) -> None:
        """Load weights; agree with `target` on what is shared. Raises `CheckpointError`."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the weights that it holds alone; the host subtracts them from its budget."""
        ...

    def supports_batch_sharded_draft_logits(self) -> bool:
        """Whether all writes of draft logits honour the owner mask, now that weights are loaded."""
        ...

    def allocate_draft_logits(
        self, plan: DraftLogitsPlan, device: torch.device
    ) -> DraftLogitsCache | None:
        """Allocate what `plan` asks for, once, at its final size; None when it has no cache."""
        ...

    def bind(self, sampler: DraftSampler, kv: KVView) -> None:
        """Take the one door for sampling and the draft KV. Called once, after allocation."""
        ...

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        """Draft up to K tokens for each request of the batch, identically on every rank."""
        ...

    def release(self, req_state_idx: int) -> None:
        """Forget whatever is kept for the slot: it is free again."""
        ...


class SpeculatorBase:
    """Default behaviour: `propose` is `prepare` (eager) and then `draft` (capturable).

    A subclass writes `load_model`, `weight_bytes`, `prepare` and `draft`.

    Attributes:
        target_ids: integers `[draft_vocab_size]`, the target id of each column of a reduced draft
            head, which `load_model` reads from the checkpoint; None where column and id are the
            same. The host hands it to the `DraftSampler`, and so draft ids never leave the core.
        opt_out_reason: why `supports_batch_sharded_draft_logits` answers False, where loading has
            told; the plan's verdict repeats it.
        tensors_of_target: names that it reads of the target's own checkpoint, where its weights lie
            in that.
    """

    opt_out_reason: str = ""
    tensors_of_target: frozenset[str] = frozenset()

    def __init__(self, context: SpeculatorContext) -> None:
        speculative = context.config.speculative
        assert speculative is not None
        assert speculative.num_speculative_tokens is not None
        self.context = context
        self.spec = context.spec
        self.num_speculative_tokens: int = speculative.num_speculative_tokens
        self.draft_logits: DraftLogitsCache | None = None
        self.target_ids: Tensor | None = None
        self.sampler: DraftSampler | None = None
        self.kv: KVView | None = None

    def load_model(self, target: TargetView) -> None:
        raise NotImplementedError

    def weight_bytes(self) -> int:
        raise NotImplementedError

    def supports_batch_sharded_draft_logits(self) -> bool:
        """The static declaration; a subclass refines it with what loading has told."""
        return self.context.capabilities.honors_owner_mask

    def allocate_draft_logits(
        self, plan: DraftLogitsPlan, device: torch.device
    ) -> DraftLogitsCache | None:
        """Allocate the cache that `plan` describes, with the map, and keep it in `draft_logits`."""
        self.draft_logits = DraftLogitsCache.allocate(plan, device, self.target_ids)
        return self.draft_logits

    def bind(self, sampler: DraftSampler, kv: KVView) -> None:
        """Keep what the host lends."""
        self.sampler, self.kv = sampler, kv

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        """Prepare eagerly, then draft with static shapes."""
        self.prepare(inputs)
        return self.draft(inputs.num_reqs)

    def prepare(self, inputs: ProposeInputs) -> None:
        """Copy the batch into buffers of fixed address and bring the draft KV up to date."""
        raise NotImplementedError

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Draft from the prepared buffers: static shapes, no host synchronisation.

        A host may capture it as a CUDA graph and replay that after other calls of `prepare`. So it
        reads and writes tensors of fixed address, branches on no tensor's value, and keeps nothing
        that it allocates but what it returns.
        """
        raise NotImplementedError

    def release(self, req_state_idx: int) -> None:
        """Nothing is kept by slot."""
