"""One rank's work in a step: target forward, verification by owner, the next proposal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specreg.batch_sharding import GatheredOutputs, check_agreement
from specreg.capabilities import HiddenStates
from specreg.fingerprint import Fingerprint
from specreg.logprobs import LogprobsFormat, TokenLogprobs
from specreg.nn.hf_decoder import DecoderOutput
from specreg.ownership import Shard
from specreg.runtime.batch import Batch
from specreg.runtime.loading import LoadedModels
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import StepOutput, StepPlan
from specreg.runtime.token_history import TokenHistory
from specreg.runtime.verifier import OwnedBatch, Verified, Verifier
from specreg.speculator import ProposeInputs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Executes step plans. Every rank runs one, on the same plans.

    Args:
        models: what was loaded and allocated for this rank.

    Raises:
        InternalError: a sharded cache with a rejection sampler that does not accept one.
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
        batch = Batch.pack(plan.rows, self.models.num_speculative_tokens, self.device)
        states = self._forward(batch)
        layout = LogprobsFormat.of(
            self.state.logprob_queries[row.slot]
            for row in plan.rows
            if row.num_logits and row.slot in self.state.logprob_queries
        )
        verified = self._verify(batch, states.hidden, layout)
        self.processors.count(batch.slots, verified.sampled)
        drafts = self._propose(batch, states, verified)
        check_agreement(verified.proposal_hashes.tolist(), plan.step - 1)
        return self._on_host(batch.slots, verified, drafts, layout)

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
            logits = target.compute_logits(hidden[batch.logits_indices])
            everything = OwnedBatch(
                batch.idx_mapping, batch.cu_num_logits, batch.draft_tokens, batch.positions
            )
            return self._replicated(self._verifier(logits, everything, layout))
        plan = sharder.plan(batch.idx_mapping, batch.cu_num_logits)
        rows = batch.logits_indices[plan.order.to(self.device)]
        logits = sharder.exchange_logits(target.compute_logits_local(hidden[rows]), plan)
        reqs = plan.local_reqs.to(self.device)
        owned = OwnedBatch(
            plan.local_idx_mapping,
            plan.local_cu_num_logits,
            batch.draft_tokens[reqs],
            batch.positions[reqs],
        )
        output = self._verifier(logits, owned, layout)
        return sharder.gather_outputs(
            output.sampled,
            output.num_sampled,
            output.num_nans,
            plan,
            self._proposal_hash,
            extra=_extra(output),
        )

    def _replicated(self, output: Verified) -> GatheredOutputs:
        """Every rank has verified everything; what they trade is whether they agree."""
        return GatheredOutputs(
            sampled=output.sampled,
            num_sampled=output.num_sampled,
            num_nans=output.num_nans,
            extra=_extra(output),
            proposal_hashes=self.models.tp.all_gather(
                self._proposal_hash ^ self._fingerprint(output.sampled)
            ),
        )

    def _propose(
        self, batch: Batch, states: DecoderOutput, verified: GatheredOutputs
    ) -> Tensor | None:
        """Draft for the next step; `[num_reqs, num_speculative_tokens]`, -1 where there is none."""
        if self.drafting is None:
            return None
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
        self.drafting.sampler.begin(
            inputs.idx_mapping, inputs.sample_idx_mapping, inputs.temperature, inputs.seeds
        )
        drafts = self.drafting.speculator.propose(inputs).tokens
        self._proposal_hash = self._fingerprint(drafts)
        steps = torch.arange(drafts.shape[1], device=self.device)
        return drafts.masked_fill(steps >= batch.num_draft_tokens.unsqueeze(1), -1)

    def _on_host(
        self,
        slots: Sequence[int],
        verified: GatheredOutputs,
        drafts: Tensor | None,
        layout: LogprobsFormat | None,
    ) -> StepOutput:
        sampled, counts = verified.sampled.tolist(), verified.num_sampled.tolist()
        num_usable = verified.extra[:, 0].tolist()
        emitted = [row[:count] for row, count in zip(sampled, num_usable, strict=True)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in slots]
        if layout is not None and self.models.tp.rank == 0:
            packed = verified.extra[:, 1:].reshape(len(slots), -1, layout.width).cpu()
            for row, slot in enumerate(slots):
                if (query := self.state.logprob_queries.get(slot)) is not None:
                    logprobs[row] = layout.unpack(packed[row], emitted[row], query)
        return StepOutput(
            emitted=emitted,
            drafts=[[] for _ in slots]
            if drafts is None
            else [_leading(r) for r in drafts.tolist()],
            num_nans=verified.num_nans.tolist(),
            has_failed=[usable < count for usable, count in zip(num_usable, counts, strict=True)],
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
