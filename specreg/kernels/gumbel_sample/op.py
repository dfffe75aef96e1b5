"""The entry point `gumbel_sample`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.op import check_drafts
from specreg.kernels.drafting.checks import check_vector, refuse_greedy_cache
from specreg.kernels.gumbel_sample.reference import gumbel_sample_reference
from specreg.ownership import Shard

__all__ = ["gumbel_sample"]


def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None = None,
    num_nans: Tensor | None = None,
    greedy: bool = False,
    logits_cache_num_shards: int | None = None,
    logits_cache_shard_idx: int | None = None,
    noise_steps: Tensor | None = None,
) -> Tensor:
    """Draw a draft token from each row of logits by Gumbel-max, and store the owned rows.

    The contract of `draft_sample`, with other draws: a random word for each (seed, position, step,
    target id). For watermarks and for comparison with engines that draw this way; `draft_sample` is
    faster. Does not synchronise with the host on a GPU.

    Args:
        logits, idx_mapping, steps, positions, temperature, seeds, cache, vocab_size, target_ids,
            num_nans, greedy: as in `draft_sample`.
        logits_cache_num_shards: ranks that share the requests of `cache`; None is what the cache
            says. For hosts that keep one view and know the shards themselves.
        logits_cache_shard_idx: this rank among them; None is what the cache says.
        noise_steps: int64 `[n]`, what takes the place of `steps` in the random counter, for noise
            that a reader of the text can recompute; None is `steps`.

    Returns:
        int64 `[n]` target ids, -1 for padding.

    Raises:
        TensorError: as of `draft_sample`.
        ConfigError: the shards do not make a `Shard`.
    """
    if cache is not None:
        num_shards, shard_idx = logits_cache_num_shards, logits_cache_shard_idx
        shard = Shard(
            cache.shard.num_shards if num_shards is None else num_shards,
            cache.shard.shard_idx if shard_idx is None else shard_idx,
        )
        if shard != cache.shard:
            cache = replace(cache, shard=shard)
    check_drafts(
        "gumbel_sample",
        logits,
        idx_mapping,
        steps,
        positions,
        temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
    if noise_steps is None:
        noise_steps = steps
    else:
        what, device = "value a row of logits", logits.device
        check_vector(
            "gumbel_sample", "noise_steps", noise_steps, len(steps), torch.int64, device, what
        )
    if greedy and cache is not None:
        refuse_greedy_cache("gumbel_sample")
    if uses_triton(logits.device):
        from specreg.kernels.gumbel_sample.kernel import gumbel_sample_triton as implementation
    else:
        implementation = gumbel_sample_reference
    return implementation(
        logits,
        idx_mapping,
        steps,
        positions,
        None if greedy else temperature,
        seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
        noise_steps=noise_steps,
    )
