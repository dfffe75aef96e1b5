"""Sampling state by slot, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specreg.logprobs import LogprobsQuery
from specreg.runtime.step import Admission

__all__ = ["SlotState"]


class SlotState:
    """Per-slot sampling parameters in tensors of fixed address, each `[max_num_seqs]`.

    Attributes:
        temperature: fp32; exactly 0 is greedy.
        seeds: int64.
        top_k: int64; 0 keeps all.
        top_p, min_p: fp32; 1 and 0 keep all.
        logprob_queries: by slot, of the requests that ask for log probabilities; on the host.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.temperature = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self.logprob_queries: dict[int, LogprobsQuery] = {}
        self._slots_with_cutoffs: set[int] = set()

    def admit(self, admission: Admission) -> None:
        """Take over the parameters of the request that got the slot."""
        slot = admission.slot
        for name in ("temperature", "seed", "top_k", "top_p", "min_p"):
            tensor = self.seeds if name == "seed" else getattr(self, name)
            tensor[slot].fill_(getattr(admission, name))  # Assigning would wait for a device.
        cuts = admission.top_k > 0 or admission.top_p < 1 or admission.min_p > 0
        if cuts and admission.temperature > 0:
            self._slots_with_cutoffs.add(slot)
        if admission.num_top_logprobs is not None:
            self.logprob_queries[slot] = LogprobsQuery(
                admission.num_top_logprobs, tuple(admission.logprob_token_ids)
            )

    def release(self, slot: int) -> None:
        """Forget what makes a slot cost more than others; its numbers stay until it is taken."""
        self._slots_with_cutoffs.discard(slot)
        self.logprob_queries.pop(slot, None)

    def has_cutoffs(self, slots: Iterable[int]) -> bool:
        """Whether any of the slots may cut tokens off. Host state only."""
        return not self._slots_with_cutoffs.isdisjoint(slots)
