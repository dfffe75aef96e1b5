"""The samplers: the steps of a proposal in torch, in place of kernels of one's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from specreg_dspark.hooks import MarkovSamplerContext
from specreg_dspark.markov_inputs import MarkovInputs
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsView
from specreg.kernels import draft_sample

__all__ = ["make_full_cache", "make_owner_aware"]

Sampler = Callable[[MarkovInputs], bool]


def make_owner_aware(context: MarkovSamplerContext) -> Sampler:
    """A sampler whose stores go through the owner mask, with their statistics."""
    del context
    return owner_aware


def make_full_cache(context: MarkovSamplerContext) -> Sampler:
    """A sampler like one of an engine that keeps every request on every rank."""
    del context
    return full_cache


def owner_aware(inputs: MarkovInputs) -> bool:
    """`draft_sample` stores what the cache's shard owns, where it belongs."""
    previous = inputs.anchors
    for step in range(inputs.tokens.shape[1]):
        previous = _draw(inputs, _logits(inputs, previous, step), step, inputs.cache)
        inputs.tokens[:, step] = previous
    return True


def full_cache(inputs: MarkovInputs) -> bool:
    """The row of a request is its slot, as in a kernel that computes `slot * stride`.

    It knows no reduced vocabulary and declines one. Where a kernel would mask its stores, rows
    without a request store what a live row does, so that nothing is asked of the host.
    """
    cache, slots, previous = inputs.cache, inputs.idx_mapping, inputs.anchors
    if inputs.target_ids is not None or (cache and cache.layout is not DraftLogitsLayout.DENSE):
        return False
    is_live, indices = slots >= 0, torch.arange(len(slots), device=slots.device)
    rows = torch.where(is_live, indices, is_live.int().argmax())
    targets = slots[rows]  # -1, the last slot, where no row is live: that one keeps what it has
    for step in range(inputs.tokens.shape[1]):
        logits = _logits(inputs, previous, step)
        if cache is not None:
            cells = _rows_by_slot(cache, len(inputs.seeds))[:, step]
            kept = torch.where((targets >= 0)[:, None], logits[rows], cells[targets])
            cells[targets] = kept
        previous = _draw(inputs, logits, step, None)
        inputs.tokens[:, step] = previous
    return True


def _rows_by_slot(cache: DraftLogitsView, max_num_seqs: int) -> Tensor:
    """A row a slot, whatever rows the cache has: nothing checks the address of a kernel."""
    logits = cache.logits
    shape = (max_num_seqs, *logits.shape[1:])
    return torch.as_strided(logits, shape, logits.stride(), logits.storage_offset())


def _logits(inputs: MarkovInputs, previous: Tensor, step: int) -> Tensor:
    num_columns = min(inputs.base_logits.shape[2], inputs.vocab_size)
    if inputs.target_ids is not None:
        num_columns = len(inputs.target_ids)
    base = inputs.base_logits[:, step, :num_columns]
    bias = inputs.w1[previous.clamp(min=0)] @ inputs.w2[:num_columns].T
    if inputs.soft_cap is not None:
        bias = inputs.soft_cap * torch.tanh(bias.float() / inputs.soft_cap)
    return base + (bias * inputs.scale).to(base.dtype)


def _draw(inputs: MarkovInputs, logits: Tensor, step: int, cache: DraftLogitsView | None) -> Tensor:
    return draft_sample(
        logits,
        inputs.idx_mapping,
        torch.full_like(inputs.idx_mapping, step),
        inputs.positions + step,
        inputs.temperature,
        inputs.seeds,
        cache,
        vocab_size=inputs.vocab_size,
        target_ids=inputs.target_ids,
        num_nans=inputs.num_nans,
        greedy=inputs.greedy,
    )
