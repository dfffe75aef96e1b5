"""Listening at the one door: what a speculator hands to its `DraftSampler`, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specreg.draft_sampler import DraftSampler

__all__ = ["SamplerProbe"]


class SamplerProbe:
    """Records every draw of a sampler, whose methods it wraps in place.

    Args:
        sampler: still used by its host; wrapped.
        num_steps: K.
        around: called around each draw with a function that makes it; for whoever must know that
            the core is at work.

    Attributes:
        ids: int64 `[num_reqs, num_steps]` of the proposal under way, -2 where nothing was drawn.
        logits: fp32 `[num_reqs, num_steps, vocab_size]`, NaN where nothing was drawn.
        num_calls: draws of the proposal under way.
    """

    def __init__(
        self,
        sampler: DraftSampler,
        num_steps: int,
        around: Callable[[Callable[[], Tensor]], Tensor],
    ) -> None:
        self.sampler = sampler
        self.num_steps = num_steps
        self.num_calls = 0
        self._around = around
        self.begin(0)
        for name, scatter in (("sample", self._columns), ("sample_candidates", self._candidates)):
            method = getattr(sampler, name, None)
            if method is not None:
                setattr(sampler, name, self._wrapped(method, scatter))

    def begin(self, num_reqs: int) -> None:
        """A proposal for `num_reqs` batch rows starts."""
        self.num_calls = 0
        self.ids = torch.full((num_reqs, self.num_steps), -2)
        shape = (num_reqs, self.num_steps, self.sampler.vocab_size)
        self.logits = torch.full(shape, torch.nan, dtype=torch.float32)

    def _wrapped(
        self, method: Callable[..., Tensor], scatter: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def draw(*args: Any, **kwargs: Any) -> Tensor:
            ids = self._around(lambda: method(*args, **kwargs))
            self._around(lambda: self._record(ids.cpu(), scatter, *args, **kwargs))
            return ids

        return draw

    def _record(
        self, ids: Tensor, scatter: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> Tensor:
        names = ("ids", "scores") if scatter == self._candidates else ("logits",)
        given = dict(zip((*names, "step", "positions"), args, strict=False)) | kwargs
        given = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in given.items()}
        full = scatter(*(given[name] for name in names))
        self.num_calls += 1
        num_reqs = max(1, len(self.ids))
        step = given["step"]
        steps = step if isinstance(step, Tensor) else torch.full_like(ids, step)
        reqs = torch.arange(len(ids)) // max(1, len(ids) // num_reqs)
        if len(self.ids):
            self.ids[reqs, steps] = ids
            self.logits[reqs, steps] = full
        return ids

    def _columns(self, logits: Tensor) -> Tensor:
        """Draft logits over the target's vocabulary."""
        vocab_size, target_ids = self.sampler.vocab_size, self.sampler.target_ids
        full = torch.full((len(logits), vocab_size), -torch.inf, dtype=torch.float32)
        if target_ids is not None:
            full[:, target_ids.cpu()] = logits[:, : len(target_ids)].float()
            return full
        width = min(vocab_size, logits.shape[1])
        full[:, :width] = logits[:, :width].float()
        return full

    def _candidates(self, ids: Tensor, scores: Tensor) -> Tensor:
        shape = (len(ids), self.sampler.vocab_size)
        full = torch.full(shape, -torch.inf, dtype=torch.float32)
        scores = scores.float().masked_fill(ids < 0, -torch.inf)
        return full.scatter_reduce(1, ids.clamp(min=0).long(), scores, "amax")
