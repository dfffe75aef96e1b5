"""One rank's work in a step: target forward, verification by owner, the next proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specreg.batch_sharding import GatheredOutputs, check_agreement
from specreg.capabilities import HiddenStates
from specreg.fingerprint import Fingerprint
from specreg.kernels.common.upload import upload
from specreg.logprobs import LogprobsFormat, TokenLogprobs
from specreg.nn.hf_decoder import DecoderOutput
from specreg.ownership import Shard, rows_per_rank
from specreg.runtime.batch import Batch
from specreg.runtime.cuda_graphs import GraphPool, GraphSizes
from specreg.runtime.loading import LoadedModels
from specreg.runtime.padded_verifier import PaddedHead, PaddedVerifier
from specreg.runtime.plugin_checks import check_draft_ids
from specreg.runtime.proposer import Proposer
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import ScheduledRow, StepOutput, StepPlan
from specreg.runtime.token_history import TokenHistory
from specreg.runtime.transfer import to_device, to_host
from specreg.runtime.verifier import OwnedBatch, Verified, Verifier
from specreg.speculator import ProposeInputs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Executes step plans. Every rank runs one, on the same plans.

    Args:
        models: what was loaded and allocated for this rank.

    Attributes:
        graph_sizes: what batches are padded to.
        padded_verifier: verifies plain batches of these sizes, or as many requests as a rank owns;
            None where nothing is padded.
        proposer: asks the speculator; None without one.

    Raises:
        InternalError: a sharded cache with a rejection sampler that does not accept one.
        PluginError: what claims to be safe for CUDA graphs cannot be captured.
    """

    def __init__(self, models: LoadedModels) -> None:
        self.models = models
        self.drafting = models.drafting
        self.draft_logits = models.drafting.draft_logits if models.drafting else None
        self.device = models.target.device
        max_num_seqs, vocab_size = models.config.max_num_seqs, models.target.vocab_size
        self.state = SlotState(max_num_seqs, self.device)
        shard = models.sharder.shard if models.sharder is not None else Shard()
        self.processors = SlotProcessors(vocab_size, self.device, shard)
        self._verifier = Verifier(
            models.rejection_sampler, self.state, self.processors, self.draft_logits, vocab_size
        )
        self._history = (
            TokenHistory(max_num_seqs, models.max_model_len, self.device)
            if models.needs.needs_token_history
            else None
        )
        num_tokens = max_num_seqs * (models.num_speculative_tokens + 1)
        self._fingerprint = Fingerprint(num_tokens, self.device)
        self._proposal_hash = torch.zeros((), dtype=torch.int64, device=self.device)
        self._proposal_step = -1
        self.graph_sizes = GraphSizes.of(models.config, self.device)
        self._padding_row = ScheduledRow(
            slot=-1,
            start=0,
            token_ids=[0],
            num_logits=0,
            num_draft_tokens=0,
            next_prefill_tokens=[-1] * models.needs.prefill_lookahead,
        )
        handle = torch.cuda.graph_pool_handle() if self.graph_sizes.is_captured else None
        self._graphs = GraphPool(handle, (models.tp.counts, models.tp.num_bytes))
        # Where logits rows of fixed address are: hidden states to score, or rows that were scored.
        self._head: PaddedHead | None = None
        self._owned_logits: Tensor | None = None
        self.padded_verifier = self._make_padded_verifier()
        self.proposer = self._make_proposer()
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    def _make_padded_verifier(self) -> PaddedVerifier | None:
        models, target, sharder = self.models, self.models.target, self.models.sharder
        is_safe = getattr(models.rejection_sampler, "is_cuda_graph_safe", False)
        if not (self.graph_sizes.sizes and is_safe):
            return None
        sizes, rows_per_req = self.graph_sizes, models.num_speculative_tokens + 1
        if sharder is None:
            self._head = PaddedHead(target, sizes.sizes[-1] * rows_per_req)
            logits = self._head.logits
        else:
            num_shards = sharder.shard.num_shards
            sizes = sizes.up_to(rows_per_rank(models.config.max_num_seqs, num_shards))
            self._owned_logits = torch.empty(
                sizes.sizes[-1] * rows_per_req,
                num_shards * target.shard_width,
                dtype=target.dtype,
                device=self.device,
            )
            scored = self._owned_logits[:, : target.vocab_size]

            def logits(num_rows: int) -> Tensor:
                return scored[:num_rows]

        return PaddedVerifier(
            logits,
            self._verifier,
            self.state,
            self.draft_logits,
            models.num_speculative_tokens,
            sizes,
            self._graphs,
        )

    def _make_proposer(self) -> Proposer | None:
        models, sizes = self.models, self.graph_sizes
        speculative = models.config.speculative
        if models.drafting is None or speculative is None:
            return None
        if speculative.enforce_eager:
            sizes = replace(sizes, is_captured=False)
        max_num_seqs = models.config.max_num_seqs
        return Proposer(models.drafting, max_num_seqs, sizes, self._graphs, self.device)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Record every graph, from the largest down, on rows that are inert."""
        if not self.graph_sizes.is_captured:
            return
        if self.padded_verifier is not None:
            self.padded_verifier.warm_up()
        for size in reversed(self.graph_sizes.sizes):
            self._run([self._padding_row] * size)

    def close(self) -> None:
        """Release the graphs, whose collectives keep the ranks' group. Safe to call twice."""
        if self.padded_verifier is not None:
            self.padded_verifier.decide.release()
        if self.proposer is not None:
            self.proposer.draft.release()

    @property
    def num_draft_nans(self) -> int:
        """Rows that drafts were sampled from with a NaN, or with nothing above -inf.

        Drafting is replicated, so every rank counts them all. Waits for the device.
        """
        return int(self.drafting.sampler.num_nans.sum()) if self.drafting is not None else 0

    def clear_counts(self) -> None:
        """Start counting anew."""
        if self.drafting is not None:
            self.drafting.sampler.num_nans.zero_()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; collective when there are several ranks, one host synchronisation.

        Raises:
            RankDivergenceError: the ranks' last proposals differ; nothing of this step is emitted.
            RankFailedError: a peer died.
        """
        self._apply(plan)
        if not plan.rows:
            return StepOutput()
        num_reqs = len(plan.rows)
        layout = LogprobsFormat.of(
            self.state.logprob_queries[row.slot]
            for row in plan.rows
            if row.num_logits and row.slot in self.state.logprob_queries
        )
        padding = [self._padding_row] * (self.graph_sizes.padded(num_reqs) - num_reqs)
        *outputs, hashes, drafts = self._fetch([*plan.rows, *padding], layout)
        check_agreement(hashes.tolist(), plan.step, self._proposal_step)
        self._proposal_step = plan.step
        outputs = [output[:num_reqs] for output in outputs]
        return self._unpack([row.slot for row in plan.rows], outputs, drafts[:num_reqs], layout)

    def _fetch(self, rows: Sequence[ScheduledRow], layout: LogprobsFormat | None) -> list[Tensor]:
        """Run a step and wait for what it gives, on the host."""
        try:
            fetched = to_host(self._run(rows, layout))
        except RuntimeError:  # Whatever an aborted collective leads to.
            self.models.tp.raise_if_aborted()
            raise
        self.models.tp.raise_if_aborted()
        return fetched

    def _run(
        self, rows: Sequence[ScheduledRow], layout: LogprobsFormat | None = None
    ) -> list[Tensor]:
        """Launch a step: the fields of `GatheredOutputs` and the drafts, all on the device."""
        batch = Batch.pack(rows, self.models.num_speculative_tokens, self.device)
        states = self._forward(batch)
        verified = self._verify(batch, states.hidden, layout)
        self.processors.count(batch.slots, verified.sampled)
        return [*verified, self._propose(batch, states, verified)]

    def _apply(self, plan: StepPlan) -> None:
        """Free, admit and grow slots, in this order: a slot may change hands within one plan."""
        for slot in plan.released:
            self.state.release(slot)
            self.processors.release(slot)
            if self.drafting is not None:
                self.drafting.speculator.release(slot)
            if self.draft_logits is not None:
                self.draft_logits.release(slot)
        for admission in plan.admitted:
            self.state.admit(admission)
            self.processors.admit(admission)
        self.processors.begin(plan.rows)
        self.models.kv_pool.assign(plan.blocks)

    def _forward(self, batch: Batch) -> DecoderOutput:
        needs = self.models.needs
        return self.models.target.forward(
            batch.input_ids,
            batch.kv_rows,
            self.models.target_kv,
            aux_layer_ids=needs.aux_layer_ids,
            pre_norm=needs.hidden_states is HiddenStates.PRE_NORM,
        )

    def _verify(
        self, batch: Batch, hidden: Tensor, layout: LogprobsFormat | None
    ) -> GatheredOutputs:
        target, sharder = self.models.target, self.models.sharder
        if sharder is None:
            if self._head is not None and self._is_plain(batch.slots, layout):
                self._head.fill(hidden, batch.logits_indices)
                assert self.padded_verifier is not None
                decided = self.padded_verifier(
                    batch.draft_tokens,
                    batch.idx_mapping_device,
                    batch.cu_num_logits_device,
                    batch.positions,
                    batch.expanded_idx_mapping,
                )
                return self._replicated(decided)
            logits = target.compute_logits(hidden[batch.logits_indices])
            everything = OwnedBatch(
                batch.idx_mapping, batch.cu_num_logits, batch.draft_tokens, batch.positions
            )
            return self._replicated(self._verifier(logits, everything, layout))
        plan = sharder.plan(batch.idx_mapping, batch.cu_num_logits)
        rows = batch.logits_indices[upload(plan.order, self.device)]
        local = target.compute_logits_local(hidden[rows])
        reqs = upload(plan.local_reqs, self.device)
        owned = OwnedBatch(
            plan.local_idx_mapping,
            plan.local_cu_num_logits,
            batch.draft_tokens[reqs],
            batch.positions[reqs],
        )
        if self._is_plain(owned.idx_mapping.tolist(), layout):
            sharder.exchange_logits(local, plan, out=self._owned_logits)
            output = self._verify_owned(owned)
        else:
            output = self._verifier(sharder.exchange_logits(local, plan), owned, layout)
        return sharder.gather_outputs(
            output.sampled,
            output.num_sampled,
            output.num_nans,
            plan,
            self._proposal_hash,
            extra=_extra(output),
        )

    def _verify_owned(self, owned: OwnedBatch) -> Verified:
        """Decide a plain batch whose logits rows are where the padded verifier reads them."""
        maps = (owned.idx_mapping, owned.cu_num_logits, owned.expanded_idx_mapping)
        idx_mapping, cu_num_logits, expanded = to_device([m.tolist() for m in maps], self.device)
        assert self.padded_verifier is not None
        return self.padded_verifier(
            owned.draft_tokens, idx_mapping, cu_num_logits, owned.positions, expanded
        )

    def _is_plain(self, slots: Sequence[int], layout: LogprobsFormat | None) -> bool:
        """Whether the padded verifier serves these requests. Host state only.

        Ranks that own requests may answer differently: no collective depends on it.
        """
        return (
            layout is None
            and self.padded_verifier is not None
            and 0 < len(slots) <= self.padded_verifier.sizes.sizes[-1]
            and not self.state.has_cutoffs(slots)
            and not any(self.processors.works_for(slot) for slot in slots)
        )

    def _replicated(self, output: Verified) -> GatheredOutputs:
        """Every rank has verified everything; what they trade is whether they agree."""
        return GatheredOutputs(
            sampled=output.sampled,
            num_sampled=output.num_sampled,
            num_nans=output.num_nans,
            extra=_extra(output),
            hashes=self.models.tp.all_gather(
                torch.stack([self._proposal_hash, self._fingerprint(output.sampled)])
            ),
        )

    def _propose(self, batch: Batch, states: DecoderOutput, verified: GatheredOutputs) -> Tensor:
        """Draft for the next step; `[num_reqs, num_speculative_tokens]`, -1 where there is none."""
        if self.drafting is None or self.proposer is None:
            return batch.draft_tokens[:, :0]
        num_sampled = verified.num_sampled
        decides = num_sampled > 0
        wants = decides & (batch.num_draft_tokens > 0)
        newest = (num_sampled - 1).clamp(min=0).unsqueeze(1)
        history = self._history
        inputs = ProposeInputs(
            input_ids=batch.input_ids,
            positions=batch.kv_rows.positions,
            query_start_loc=batch.query_start_loc,
            idx_mapping=batch.idx_mapping_device,
            sample_idx_mapping=torch.where(wants, batch.idx_mapping_device, -1),
            num_sampled=num_sampled,
            num_rejected=torch.where(decides, batch.num_logits - num_sampled, 0),
            last_sampled=verified.sampled.gather(1, newest).squeeze(1),
            next_prefill_tokens=batch.next_prefill_tokens,
            num_draft_tokens=batch.num_draft_tokens,
            temperature=self.state.temperature,
            seeds=self.state.seeds,
            hidden_states=_wanted(states, self.drafting.needs.hidden_states),
            aux_hidden_states=torch.cat(list(states.aux.values()), 1) if states.aux else None,
            token_history=history.update(batch, verified.sampled, num_sampled) if history else None,
        )
        drafts = self.proposer(inputs)
        self._proposal_hash = self._fingerprint(drafts)
        steps = torch.arange(drafts.shape[1], device=self.device)
        return drafts.masked_fill(steps >= batch.num_draft_tokens.unsqueeze(1), -1)

    def _unpack(
        self,
        slots: Sequence[int],
        outputs: Sequence[Tensor],
        drafts: Tensor,
        layout: LogprobsFormat | None,
    ) -> StepOutput:
        """What a step has put on the host, as lists."""
        sampled, counts, num_nans, extra = outputs
        num_usable = extra[:, 0].tolist()
        emitted = [row[:count] for row, count in zip(sampled.tolist(), num_usable, strict=True)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in slots]
        if layout is not None and self.models.tp.rank == 0:
            packed = extra[:, 1:].reshape(len(slots), -1, layout.width)
            for row, slot in enumerate(slots):
                if (query := self.state.logprob_queries.get(slot)) is not None:
                    logprobs[row] = layout.unpack(packed[row], emitted[row], query)
        proposals = drafts.tolist()
        if self.drafting is not None:
            name = self.drafting.speculator.spec.name
            check_draft_ids(name, proposals, self.models.target.vocab_size)
        return StepOutput(
            emitted=emitted,
            drafts=[_leading(row) for row in proposals],
            num_nans=num_nans.tolist(),
            has_failed=[
                usable < count for usable, count in zip(num_usable, counts.tolist(), strict=True)
            ],
            logprobs=logprobs,
        )


def _extra(output: Verified) -> Tensor:
    """What travels beside the tokens."""
    return torch.cat([output.num_usable.unsqueeze(1), output.logprobs], 1)


def _wanted(states: DecoderOutput, kind: HiddenStates) -> Tensor | None:
    return {
        HiddenStates.NONE: None,
        HiddenStates.POST_NORM: states.hidden,
        HiddenStates.PRE_NORM: states.pre_norm,
    }[kind]


def _leading(drafts: list[int]) -> list[int]:
    """Drafts up to the first missing one."""
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts
