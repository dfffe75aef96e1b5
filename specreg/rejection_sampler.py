"""Verification of drafts, cut-offs included, and the guard of what a sampler may receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.cutoffs import apply_cutoffs
from specreg.draft_logits import DraftLogitsCache
from specreg.errors import ConfigError, InternalError
from specreg.kernels import cell_statistics, rejection_sample
from specreg.kernels.rejection_sample.batch import RejectionOutput as VerifyOutput
from specreg.kernels.rejection_sample.op import METHODS
from specreg.spelling import known_names

if TYPE_CHECKING:
    from specreg.config import EngineConfig

__all__ = [
    "RejectionSampler",
    "RejectionSamplerContext",
    "VerifyInputs",
    "VerifyOutput",
    "check_receives",
]

# Logits elements copied at a time for requests with cut-offs.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class VerifyInputs:
    """What a host hands to a rejection sampler: the requests that this rank verifies.

    Attributes:
        target_logits: `[num_logits, >= vocab_size]`, before temperature; not written to.
        draft_tokens: int64 `[num_reqs, num_speculative_tokens]`, -1 where there is none.
        idx_mapping: int64 `[num_reqs]`, request state indices; -1 marks a padding row.
        cu_num_logits: int32 or int64 `[num_reqs + 1]`, offsets of the requests' logits rows.
        positions: int64 `[num_reqs]`, position of the first token decided.
        expanded_idx_mapping: int64 `[num_logits]`, request state index of each logits row.
        temperature, top_p, min_p: fp32 `[max_num_seqs]` by slot; 0, 1 and 0 are greedy and off.
        seeds, top_k: int64 `[max_num_seqs]` by slot; a `top_k` of 0 is off.
        has_cutoffs: whether a request of the batch uses top_k, top_p or min_p; a host fact.
        draft_logits: what this rank keeps of the draft distributions; None when drafts were
            argmaxes.
    """

    target_logits: Tensor
    draft_tokens: Tensor
    idx_mapping: Tensor
    cu_num_logits: Tensor
    positions: Tensor
    expanded_idx_mapping: Tensor
    temperature: Tensor
    seeds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    has_cutoffs: bool
    draft_logits: DraftLogitsCache | None


@dataclass(frozen=True)
class RejectionSamplerContext:
    """What the factory of a plugin's rejection sampler gets.

    It returns a callable from `VerifyInputs` to `VerifyOutput`. The callable declares what it reads
    as attributes, `accepts_sharded_draft_logits` and `reads_layouts`, as its factory does; without
    them it is handed a replicated dense cache only.

    Attributes:
        config: the whole engine configuration.
        vocab_size: columns of the target's vocabulary.
        device: where `VerifyInputs` will be.
    """

    config: EngineConfig
    vocab_size: int
    device: torch.device


class RejectionSampler:
    """The stock rejection sampler: `specreg.kernels.rejection_sample` behind cut-offs.

    Order: temperature, top_k, top_p, min_p; then drafts are judged against what is left. Drafts
    keep the distribution that they were drawn from, whatever the cut-offs.

    Cells whose logits were stored bare get their statistics first, where the cache may hold some.

    Args:
        method: how drafts are judged: `"standard"`, `"block"`, or `"synthetic"`, which accepts at
            given rates and is not lossless.
        vocab_size: columns of the target's vocabulary.
        acceptance_rates: of `synthetic`, one a draft: the probability that it and all before it are
            accepted.
        acceptance_length: of `synthetic` in place of rates: mean tokens a round. As many drafts as
            fit into it are accepted for certain, the next one with what is left, so the length
            varies as little as it can.

    Raises:
        ConfigError: the method is not known, or has no rates and no length, or both, or is not
            `synthetic` and has one.
    """

    accepts_sharded_draft_logits: ClassVar[bool] = True
    is_cuda_graph_safe: ClassVar[bool] = True  # without cut-offs
    reads_layouts: ClassVar[frozenset[DraftLogitsLayout]] = frozenset(DraftLogitsLayout)

    def __init__(
        self,
        method: str = "standard",
        *,
        vocab_size: int,
        acceptance_rates: Sequence[float] | None = None,
        acceptance_length: float | None = None,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(
                "the rejection sampling method is not known",
                where="rejection_sample_method",
                got=f"{method!r}; {known_names(method, METHODS)}",
                fix="set one of the known methods",
            )
        num_given = (acceptance_rates is not None) + (acceptance_length is not None)
        if num_given != METHODS[method].takes_rates:
            raise ConfigError(
                "synthetic acceptance cannot be configured like this",
                where="RejectionSampler(acceptance_rates, acceptance_length)",
                got=f"{num_given} of the two with method {method!r}; allowed: one with "
                "'synthetic', and none with other methods",
                fix="give rates or a length for method 'synthetic', and remove them for others",
            )
        self.method = method
        self.vocab_size = vocab_size
        self.acceptance_rates = acceptance_rates
        self.acceptance_length = acceptance_length
        self._rates: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, inputs: VerifyInputs) -> VerifyOutput:
        """Verify a batch; the outputs are new tensors.

        Without cut-offs this does not synchronise with the host on a GPU. With them it does, and it
        copies logits: at most `CHUNK_ELEMENTS` of them, or one request's rows, at a time.

        Raises:
            TensorError: shapes, dtypes or devices that do not fit.
        """
        cache = inputs.draft_logits
        if cache is not None and cache.may_have_bare_cells:
            cell_statistics(cache.view(), inputs.idx_mapping)
        if not (inputs.has_cutoffs and inputs.idx_mapping.numel()):
            return self._verify(inputs, inputs.target_logits, inputs.cu_num_logits, 0)
        parts = [
            self._verify(
                inputs,
                apply_cutoffs(
                    inputs.target_logits[first_row:last_row],
                    inputs.expanded_idx_mapping[first_row:last_row],
                    inputs.temperature,
                    inputs.top_k,
                    inputs.top_p,
                    inputs.min_p,
                    vocab_size=self.vocab_size,
                ),
                inputs.cu_num_logits[start : stop + 1] - first_row,
                start,
            )
            for start, stop, first_row, last_row in self._chunks(inputs)
        ]
        return VerifyOutput(*(torch.cat(fields) for fields in zip(*parts, strict=True)))

    def _verify(
        self, inputs: VerifyInputs, logits: Tensor, cu_num_logits: Tensor, start: int
    ) -> VerifyOutput:
        """Verify the requests from `start` on that `cu_num_logits` spans."""
        reqs = slice(start, start + len(cu_num_logits) - 1)
        cache = inputs.draft_logits
        return rejection_sample(
            logits,
            inputs.draft_tokens[reqs],
            inputs.idx_mapping[reqs],
            cu_num_logits,
            inputs.positions[reqs],
            inputs.temperature,
            inputs.seeds,
            None if cache is None else cache.view(),
            vocab_size=self.vocab_size,
            method=self.method,
            acceptance_rates=self._rates_of(inputs.draft_tokens),
        )

    def _rates_of(self, draft_tokens: Tensor) -> Tensor | None:
        """fp32 `[num_speculative_tokens]` where the drafts are; copied there once."""
        if not METHODS[self.method].takes_rates:
            return None
        key = (draft_tokens.shape[1], draft_tokens.device)
        if key not in self._rates:
            rates = self.acceptance_rates
            if rates is None:
                assert self.acceptance_length is not None
                accepted = self.acceptance_length - 1
                rates = [min(max(accepted - i, 0.0), 1.0) for i in range(draft_tokens.shape[1])]
            self._rates[key] = torch.tensor(rates, dtype=torch.float32, device=key[1])
        return self._rates[key]

    def _chunks(self, inputs: VerifyInputs) -> Iterator[tuple[int, int, int, int]]:
        """(first request, last + 1, first logits row, last + 1) of chunks of whole requests."""
        rows = inputs.cu_num_logits.tolist()
        most = max(1, CHUNK_ELEMENTS // self.vocab_size)
        start, num_reqs = 0, len(rows) - 1
        while start < num_reqs:
            stop = start + 1
            while stop < num_reqs and rows[stop + 1] - rows[start] <= most:
                stop += 1
            yield start, stop, rows[start], rows[stop]
            start = stop


def check_receives(rejection_sampler: object, draft_logits: DraftLogitsCache | None) -> None:
    """Assert that a sampler which does not read a sharded cache is never handed one.

    A host calls it once both exist, before the first step: the policy decides, this guards.

    Raises:
        InternalError: naming the sampler and the number of shards.
    """
    accepts = getattr(rejection_sampler, "accepts_sharded_draft_logits", False)
    if draft_logits is not None and draft_logits.num_shards > 1 and not accepts:
        raise InternalError(
            "a rejection sampler is handed a sharded cache that it does not accept",
            where=f"{type(rejection_sampler).__name__}.accepts_sharded_draft_logits",
            got=f"num_shards={draft_logits.num_shards}; allowed: 1 where it is not declared True",
            fix="set draft_logits_sharding to off, or declare it if the sampler reads its own rows",
        )
