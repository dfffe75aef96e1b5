"""One rank's work in a step: target forward, verification by owner, the next proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.batch_sharding import GatheredOutputs, check_agreement
from specreg.capabilities import HiddenStates
from specreg.fingerprint import Fingerprint
from specreg.nn.hf_decoder import DecoderOutput
from specreg.rejection_sampler import VerifyInputs, VerifyOutput
from specreg.runtime.batch import Batch
from specreg.runtime.loading import LoadedModels
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import StepOutput, StepPlan
from specreg.speculator import ProposeInputs

__all__ = ["ModelRunner"]


class ModelRunner:
    """Executes step plans. Every rank runs one, on the same plans.

    Args:
        models: what was loaded and allocated for this rank.
    """

    def __init__(self, models: LoadedModels) -> None:
        self.models = models
        self.drafting = models.drafting
        self.draft_logits = models.drafting.draft_logits if models.drafting else None
        self.device = models.target.device
        self.state = SlotState(models.config.max_num_seqs, self.device)
        num_tokens = models.config.max_num_seqs * (models.num_speculative_tokens + 1)
        self._fingerprint = Fingerprint(num_tokens, self.device)
        self._proposal_hash = torch.zeros((), dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; collective when there are several ranks, one host synchronisation.

        Raises:
            RankDivergenceError: the ranks' last proposals differ; nothing of this step is emitted.
            RankFailedError: a peer died.
        """
        self._apply(plan)
        if not plan.rows:
            return StepOutput(emitted=[], drafts=[], num_nans=[])
        batch = Batch.pack(plan.rows, self.models.num_speculative_tokens, self.device)
        states = self._forward(batch)
        verified = self._verify(batch, states.hidden)
        drafts = self._propose(batch, states, verified)
        check_agreement(verified.proposal_hashes.tolist(), plan.step - 1)
        return _on_host(verified, drafts)

    def _apply(self, plan: StepPlan) -> None:
        """Free, admit and grow slots, in this order: a slot may change hands within one plan."""
        for slot in plan.released:
            if self.drafting is not None:
                self.drafting.speculator.release(slot)
            if self.draft_logits is not None:
                self.draft_logits.release(slot)
        for admission in plan.admitted:
            self.state.admit(admission)
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

    def _verify(self, batch: Batch, hidden: Tensor) -> GatheredOutputs:
        target, sharder = self.models.target, self.models.sharder
        if sharder is None:
            logits = target.compute_logits(hidden[batch.logits_indices])
            output = self._sample(batch, logits, batch.idx_mapping, batch.cu_num_logits, None)
            return self._replicated(output)
        plan = sharder.plan(batch.idx_mapping, batch.cu_num_logits)
        rows = batch.logits_indices[plan.order.to(self.device)]
        logits = sharder.exchange_logits(target.compute_logits_local(hidden[rows]), plan)
        output = self._sample(
            batch, logits, plan.local_idx_mapping, plan.local_cu_num_logits, plan.local_reqs
        )
        return sharder.gather_outputs(*output, plan, self._proposal_hash)

    def _sample(
        self,
        batch: Batch,
        logits: Tensor,
        idx_mapping: Tensor,
        cu_num_logits: Tensor,
        batch_rows: Tensor | None,
    ) -> VerifyOutput:
        """Verify the requests of `idx_mapping`, a host tensor; `batch_rows` says which they are."""
        drafts, positions = batch.draft_tokens, batch.positions
        if batch_rows is not None:
            batch_rows = batch_rows.to(self.device)
            drafts, positions = drafts[batch_rows], positions[batch_rows]
        expanded = idx_mapping.repeat_interleave(cu_num_logits.diff())
        return self.models.rejection_sampler(
            VerifyInputs(
                target_logits=logits,
                draft_tokens=drafts,
                idx_mapping=idx_mapping.to(self.device),
                expanded_idx_mapping=expanded.to(self.device),
                cu_num_logits=cu_num_logits.to(self.device),
                positions=positions,
                temperature=self.state.temperature,
                seeds=self.state.seeds,
                top_k=self.state.top_k,
                top_p=self.state.top_p,
                min_p=self.state.min_p,
                has_cutoffs=self.state.has_cutoffs(idx_mapping.tolist()),
                draft_logits=self.draft_logits,
            )
        )

    def _replicated(self, output: VerifyOutput) -> GatheredOutputs:
        """Every rank has verified everything; what they trade is whether they agree."""
        return GatheredOutputs(
            sampled=output.sampled,
            num_sampled=output.num_sampled.to(torch.int64),
            num_nans=output.num_nans.to(torch.int64),
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
            token_history=batch.history,
        )
        self.drafting.sampler.begin(
            inputs.idx_mapping, inputs.sample_idx_mapping, inputs.temperature, inputs.seeds
        )
        drafts = self.drafting.speculator.propose(inputs).tokens
        self._proposal_hash = self._fingerprint(drafts)
        steps = torch.arange(drafts.shape[1], device=self.device)
        return drafts.masked_fill(steps >= batch.num_draft_tokens.unsqueeze(1), -1)


def _wanted(states: DecoderOutput, kind: HiddenStates) -> Tensor | None:
    return {
        HiddenStates.NONE: None,
        HiddenStates.POST_NORM: states.hidden,
        HiddenStates.PRE_NORM: states.pre_norm,
    }[kind]


def _on_host(verified: GatheredOutputs, drafts: Tensor | None) -> StepOutput:
    counts = verified.num_sampled.tolist()
    emitted = [row[:count] for row, count in zip(verified.sampled.tolist(), counts, strict=True)]
    proposals = [[] for _ in counts] if drafts is None else [_leading(r) for r in drafts.tolist()]
    return StepOutput(emitted=emitted, drafts=proposals, num_nans=verified.num_nans.tolist())


def _leading(drafts: list[int]) -> list[int]:
    """Drafts up to the first missing one."""
    return drafts[: drafts.index(-1)] if -1 in drafts else drafts
