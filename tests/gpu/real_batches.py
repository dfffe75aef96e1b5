"""Requests of a real size on a GPU, and their verification by kernel and twin."""

from __future__ import annotations

from typing import Any

import torch
from kernels.verification_cases import Batch, make_cache

from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.rejection_sample.batch import RejectionBatch
from specreg.kernels.rejection_sample.block.reference import block_sample_reference
from specreg.kernels.rejection_sample.reference import rejection_sample_reference
from specreg.kernels.rejection_sample.synthetic.reference import synthetic_sample_reference
from specreg.ownership import Shard

BF16, FP32 = torch.bfloat16, torch.float32
LARGE = 248_320
TWINS = {
    "standard": rejection_sample_reference,
    "block": block_sample_reference,
    "synthetic": synthetic_sample_reference,
}


def real_batch(
    num_reqs=64,
    num_drafts=7,
    vocab_size=LARGE,
    *,
    dtype=BF16,
    draft_dtype=BF16,
    shard=Shard(4, 1),  # noqa: B008 - frozen
    temperature=None,
    scale=3.0,
    closeness=0.7,
    seed=0,
) -> Batch:
    """Requests of one rank with drafts from a cache; about two of seven drafts are accepted."""
    generator = torch.Generator("cuda").manual_seed(seed)
    max_num_seqs = num_reqs * shard.num_shards

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    slots = torch.arange(num_reqs, device="cuda") * shard.num_shards + shard.shard_idx
    slots = slots[torch.randperm(num_reqs, device="cuda", generator=generator)]
    seeds = torch.randint(-(2**62), 2**62, (max_num_seqs,), device="cuda", generator=generator)
    at = 0.7 if temperature is None else temperature
    temperatures = torch.full((max_num_seqs,), at, device="cuda")
    positions = torch.randint(0, 2**20, (num_reqs,), device="cuda", generator=generator)
    target = (normal(num_reqs, num_drafts + 1, vocab_size) * scale).to(dtype)
    cache = make_cache(max_num_seqs, num_drafts, vocab_size, draft_dtype, shard, "cuda")
    drafts = torch.full((num_reqs, num_drafts), -1, device="cuda")
    for step in range(num_drafts):
        logits = (target[:, step] + normal(num_reqs, vocab_size) * closeness).to(draft_dtype)
        steps = torch.full_like(slots, step)
        drafts[:, step] = draft_sample(
            logits,
            slots,
            steps,
            positions + step,
            temperatures,
            seeds,
            cache,
            vocab_size=vocab_size,
        )
    return Batch(
        target_logits=target.flatten(0, 1),
        draft_tokens=drafts,
        idx_mapping=slots,
        cu_num_logits=torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32)
        * (num_drafts + 1),
        positions=positions,
        temperature=temperatures,
        seeds=seeds,
        cache=cache,
    )


def verify(batch: Batch, method: str = "standard"):
    """Run the op."""
    return rejection_sample(*batch, vocab_size=batch.cache.vocab_size, **of_method(batch, method))


def of_method(batch: Batch, method: str) -> dict[str, Any]:
    """The arguments that choose a method."""
    num_drafts = batch.draft_tokens.shape[1]
    rates = torch.linspace(0.9, 0.3, num_drafts, device="cuda") if method == "synthetic" else None
    return {"method": method, "acceptance_rates": rates}


def agree(batch: Batch, vocab_size: int, method: str = "standard"):
    """Kernel and twin on the same device.

    `exp2` differs in the last bits, which can move a draw across the edge of a block or column: 3%
    of the requests, or one, may differ in their last token alone.
    """
    arguments = of_method(batch, method)
    output = rejection_sample(*batch, vocab_size=vocab_size, **arguments)
    rates = arguments["acceptance_rates"]
    twin = TWINS[method](RejectionBatch(*batch, vocab_size=vocab_size, acceptance_rates=rates))
    assert torch.equal(output.num_sampled, twin.num_sampled)
    assert torch.equal(output.num_nans, twin.num_nans)
    differs = output.sampled != twin.sampled
    steps = torch.arange(output.sampled.shape[1], device="cuda")
    assert not differs[steps != output.num_sampled[:, None] - 1].any()
    assert int(differs.sum()) <= max(1, 0.03 * len(differs))
    return output
