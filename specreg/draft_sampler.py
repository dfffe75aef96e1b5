"""The one door through which drafts are sampled and their logits stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specreg.capabilities import FusedSampling
from specreg.draft_logits import DraftLogitsCache, DraftLogitsView
from specreg.draft_vocab import check_target_ids
from specreg.errors import InternalError, PluginError, TensorError
from specreg.fingerprint import Fingerprint
from specreg.kernels.cache_candidates.op import cache_candidates
from specreg.kernels.draft_sample.op import draft_sample
from specreg.marked_drafts import MarkedDrafts, refuse_marked_candidates

if TYPE_CHECKING:
    from specreg.watermark import DraftWatermarker

__all__ = ["DraftSampler", "LentSampling"]


class LentSampling(NamedTuple):
    """What a declared fused sampler needs to draw a proposal itself. Tensors alias the host's.

    Attributes:
        slots: int64 `[num_reqs]`, request state index of each batch row; -1 where a request samples
            nothing: nothing is stored for it.
        temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
        seeds: int64 `[max_num_seqs]` by slot.
        cache: where logits go; None stores nothing.
        vocab_size: columns of the target's vocabulary.
        target_ids: int64 `[num_draft_columns]` of a reduced draft head, or None.
        greedy: take the argmax whatever the temperature.
        num_nans: int32 `[max_num_seqs]` by slot, counted up as `draft_sample` does.
    """

    slots: Tensor
    temperature: Tensor
    seeds: Tensor
    cache: DraftLogitsView | None
    vocab_size: int
    target_ids: Tensor | None
    greedy: bool
    num_nans: Tensor


class DraftSampler:
    """Samples a proposal's draft tokens; owns cache, shard, statistics, watermark and greedy mode.

    The host makes one a run, calls `begin` before each proposal and reads `num_nans` and
    `proposal_hash`; a speculator only calls `sample`, `sample_block` or `sample_candidates`, and
    `lend` if it declares fused sampling. Nothing synchronises with the host on a GPU.

    Args:
        cache: where the owned rows go; None stores nothing, and drafts are verified as one-hot.
        vocab_size: columns of the target's vocabulary.
        max_num_seqs: slots.
        num_speculative_tokens: K, the steps of a proposal.
        device: of logits and maps.
        greedy: take the argmax whatever the temperature; goes with no cache.
        target_ids: integers `[num_draft_columns]`, target id of each column of a reduced draft
            head; None takes the cache's.
        watermarker: draws in place of the sampler; None without one.
        fused_sampling: what the speculator declares. One that declares none is lent nothing.

    Attributes:
        num_nans: int32 `[max_num_seqs]` by slot, draft rows with a NaN or without a logit above
            -inf since the host last cleared it.

    Raises:
        InternalError: `greedy` with a cache or with a watermarker.
        TensorError: `target_ids` that repeat or lie outside the vocabulary.
    """

    def __init__(
        self,
        *,
        cache: DraftLogitsCache | None,
        vocab_size: int,
        max_num_seqs: int,
        num_speculative_tokens: int,
        device: torch.device | str,
        greedy: bool,
        target_ids: Tensor | None = None,
        watermarker: DraftWatermarker | None = None,
        fused_sampling: FusedSampling = FusedSampling.NONE,
    ) -> None:
        if greedy and (cache is not None or watermarker is not None):
            raise InternalError(
                "greedy drafts have no distribution to store or to mark",
                where="DraftSampler(greedy, cache, watermarker)",
                got="greedy=True with a cache or a watermarker; allowed: neither",
                fix="allocate no cache for draft_sample_method greedy, and load no watermarker",
            )
        if cache is not None and target_ids is None:
            self.target_ids = cache.target_ids
        else:
            self.target_ids = check_target_ids(
                target_ids,
                vocab_size=vocab_size,
                draft_vocab_size=None if target_ids is None else target_ids.numel(),
                device=device,
            )
        self.cache = cache
        self.vocab_size = vocab_size
        self.num_speculative_tokens = num_speculative_tokens
        self.greedy = greedy
        self._fused_sampling = fused_sampling
        self._view: DraftLogitsView | None = None if cache is None else cache.view()
        self.num_nans = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._fingerprint = Fingerprint(max_num_seqs * num_speculative_tokens, device)
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        # A row for each step, so that a step costs no launch to write down.
        steps = torch.arange(num_speculative_tokens, device=device)
        self._steps = steps[:, None].repeat(1, max_num_seqs)
        self._marked: MarkedDrafts | None = None
        if watermarker is not None:
            self._marked = MarkedDrafts(watermarker, max_num_seqs, device)

    def begin(
        self,
        idx_mapping: Tensor,
        sample_idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        token_history: Tensor | None = None,
    ) -> None:
        """Start a proposal: empty the cells of its requests and bind its maps.

        Keeps references, but for the history: `sample` reads what the tensors hold when it runs, so
        a host that replays a CUDA graph passes buffers of fixed address.

        Args:
            idx_mapping: int64 `[num_reqs]`, requests of the batch; -1 marks a padding row.
            sample_idx_mapping: the same, but -1 where a request samples nothing in this proposal.
            temperature: fp32 `[max_num_seqs]` by slot; exactly 0 means argmax.
            seeds: int64 `[max_num_seqs]` by slot.
            token_history: as in `ProposeInputs`; read under a watermarker alone.

        Raises:
            TensorError: `idx_mapping` is not int64 on the cache's device, or a watermarker is not
                given the history.
        """
        if self.cache is not None:
            self.cache.begin(idx_mapping)
        self._slots, self._temperature, self._seeds = sample_idx_mapping, temperature, seeds
        if self._marked is not None:
            self._marked.begin(token_history, len(sample_idx_mapping))

    def sample(self, logits: Tensor, step: int | Tensor, positions: Tensor) -> Tensor:
        """Draw one draft token from each row of logits, and store the rows that this rank owns.

        Args:
            logits: `[num_reqs, width]` for one step of every request, or `[num_reqs * m, width]`
                with the m rows of a request together; floating point.
            step: index of the rows' tokens in the proposal, or int64 of one a row. Under a
                watermarker steps are sampled one after another, each an integer.
            positions: int64, one a row: position of the token being drafted.

        Returns:
            int64, one a row: target ids; -1 where the request samples nothing.

        Raises:
            TensorError: rows that are no multiple of the bound requests, a step outside the
                proposal, several steps at once under a watermarker, or tensors that `draft_sample`
                refuses.
        """
        slots = self._slots_of(logits)
        if self._marked is not None:
            return self._marked.sample(
                step,
                logits,
                slots,
                self._steps_of(step, slots),
                temperature=self._temperature,
                cache=self._view,
                vocab_size=self.vocab_size,
                target_ids=self.target_ids,
                num_nans=self.num_nans,
            )
        return draft_sample(
            logits,
            slots,
            self._steps_of(step, slots),
            positions,
            self._temperature,
            self._seeds,
            self._view,
            vocab_size=self.vocab_size,
            target_ids=self.target_ids,
            num_nans=self.num_nans,
            greedy=self.greedy,
        )

    def sample_block(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw all drafts of a proposal whose logits do not depend on each other's tokens.

        One draw of all rows; under a watermarker, whose draws depend on the tokens before, a draw a
        step.

        Args:
            logits: `[num_reqs, num_steps, width]`, steps from 0 on; floating point.
            positions: int64 `[num_reqs, num_steps]`.

        Returns:
            int64 `[num_reqs, num_steps]`: as of `sample`.

        Raises:
            TensorError: more steps than a proposal has, and as of `sample`.
        """
        num_reqs, num_steps = positions.shape
        if self._marked is not None:
            drafts = [
                self.sample(logits[:, step], step, positions[:, step]) for step in range(num_steps)
            ]
            return torch.stack(drafts, dim=1)
        self._check_step(num_steps - 1)
        steps = self._steps[:num_steps, :num_reqs].T.contiguous().flatten()
        rows = logits.flatten(0, 1), steps, positions.contiguous().flatten()
        return self.sample(*rows).view(num_reqs, num_steps)

    def sample_candidates(
        self, ids: Tensor, scores: Tensor, step: int | Tensor, positions: Tensor
    ) -> Tensor:
        """Draw one of each row's candidates, and store the rows that this rank owns.

        The draft distribution is that of the candidates' scores and 0 everywhere else.

        Args:
            ids: integers `[n, k]` target ids, rows as of `sample`; -1 is no candidate.
            scores: fp32 `[n, k]`, logits before temperature.
            step, positions: as of `sample`.

        Returns:
            int64, one a row: target ids; -1 where the request samples nothing.

        Raises:
            TensorError: as of `sample`, tensors that `cache_candidates` refuses, or a watermarker.
        """
        if self._marked is not None:
            refuse_marked_candidates()
        slots = self._slots_of(ids)
        return cache_candidates(
            ids,
            scores,
            slots,
            self._steps_of(step, slots),
            positions,
            self._temperature,
            self._seeds,
            self._view,
            vocab_size=self.vocab_size,
            num_nans=self.num_nans,
            greedy=self.greedy,
        )

    def lend(self) -> LentSampling | None:
        """What a fused sampler draws the proposal under way from and stores it in.

        The one way past `sample`, for a speculator that declares `fused_sampling`. It writes the
        cache as its declaration says. One that stores logits without their statistics calls
        `mark_bare` behind that.

        Returns:
            None under a watermarker, whose draws are nobody else's: call `sample`.

        Raises:
            PluginError: the speculator does not declare fused sampling.
        """
        if self._fused_sampling is FusedSampling.NONE:
            raise PluginError(
                "a speculator samples in its own kernels and does not declare it",
                where="DraftSampler.lend()",
                got="Capabilities.fused_sampling none; allowed: full_cache or sharded",
                fix="declare fused_sampling in the plugin, or draw with DraftSampler.sample",
            )
        if self._marked is not None:
            return None
        return LentSampling(
            self._slots,
            self._temperature,
            self._seeds,
            self._view,
            self.vocab_size,
            self.target_ids,
            self.greedy,
            self.num_nans,
        )

    def mark_bare(self) -> None:
        """Declare all cells of the proposal under way as logits whose statistics are missing.

        Verification computes them. Nothing where there is no cache; no host synchronisation.
        """
        if self.cache is None:
            return
        num_steps, num_reqs = self.num_speculative_tokens, len(self._slots)
        steps = self._steps[:, :num_reqs].flatten()
        self.cache.mark_bare(self._slots.repeat(num_steps), steps, self._temperature)

    def proposal_hash(self, tokens: Tensor) -> Tensor:
        """64-bit hash of a proposal as an int64 scalar on the device; equal on ranks that agree.

        Args:
            tokens: int64 `[num_reqs, num_speculative_tokens]`, -1 where there is no draft.

        Raises:
            TensorError: more tokens than the slots can have.
        """
        return self._fingerprint(tokens)

    def _slots_of(self, rows: Tensor) -> Tensor:
        num_reqs, num_rows = len(self._slots), len(rows)
        if num_reqs == num_rows:
            return self._slots
        if num_reqs == 0 or num_rows % num_reqs != 0:
            raise TensorError(
                "draft logits do not match the requests of the proposal",
                where="DraftSampler.sample(logits)",
                got=f"{num_rows} rows for {num_reqs} requests; allowed: a multiple",
                fix="pass the same number of rows for each batch row of ProposeInputs, padding "
                "rows included, after the host has called begin",
            )
        return self._slots[:, None].repeat(1, num_rows // num_reqs).flatten()

    def _steps_of(self, step: int | Tensor, slots: Tensor) -> Tensor:
        if isinstance(step, Tensor):
            return step
        self._check_step(step)
        steps = self._steps[step, : len(slots)]
        return steps if len(steps) == len(slots) else torch.full_like(slots, step)

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.num_speculative_tokens:
            raise TensorError(
                "a draft lies outside its proposal",
                where="DraftSampler.sample(step)",
                got=f"{step}; allowed: 0 to {self.num_speculative_tokens - 1}",
                fix="sample num_speculative_tokens drafts, counting from 0",
            )
