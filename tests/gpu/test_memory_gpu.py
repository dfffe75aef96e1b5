"""Measured memory of the draft-logits cache, with and without sharding, against the plan."""

import dataclasses

import pytest
import torch

from specreg.config import EngineConfig
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.ownership import owner_of
from specreg.policy import resolve
from specreg.rejection_sampler import RejectionSampler, VerifyInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

ALLOCATOR_BLOCK = 2**21
NUM_RANKS = 4


def plan_of(sharding, *, max_num_seqs=256, vocab_size=248_320, dtype="bfloat16", k=7):
    """The plan of a run on four ranks that speculates with a draft model."""
    return resolve(
        EngineConfig.parse(
            {
                "vocab_size": vocab_size,
                "dtype": dtype,
                "tensor_parallel_size": NUM_RANKS,
                "enable_batch_sharded_sampling": True,
                "max_num_seqs": max_num_seqs,
                "draft_logits_sharding": sharding,
                "speculative": {
                    "method": "draft_model",
                    "model": "smollm2-135m-instruct",  # a name that is known; nothing is fetched
                    "num_speculative_tokens": k,
                    "draft_sample_method": "probabilistic",
                },
            }
        )
    )


def of_rank(plan, rank):
    return dataclasses.replace(plan, provisional=False, shard_idx=rank % plan.num_shards)


class Peak:
    """Bytes of the caching allocator on top of what was there, at the most."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize()
        self.num_bytes = torch.cuda.max_memory_allocated() - self.before


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sharding", ["off", "auto"])
def test_a_rank_allocates_what_the_plan_says(sharding, dtype):
    plan = plan_of(sharding, dtype=dtype)
    planned = plan.bytes_per_rank + plan.side_bytes_per_rank
    assert plan.num_shards == (NUM_RANKS if sharding == "auto" else 1)
    for rank in range(plan.num_shards):
        with Peak() as peak:
            cache = DraftLogitsCache.allocate(of_rank(plan, rank), "cuda")
        assert cache.nbytes == plan.bytes_per_rank
        assert planned <= peak.num_bytes <= planned + ALLOCATOR_BLOCK
        del cache


class Round:
    """A proposal and its verification on one rank of four, from its logits on."""

    def __init__(self, plan, rank):
        self.plan, self.rank = plan, rank
        self.cache = DraftLogitsCache.allocate(of_rank(plan, rank), "cuda")
        slots = plan.max_num_seqs
        self.sampler = DraftSampler(
            cache=self.cache,
            vocab_size=plan.vocab_size,
            max_num_seqs=slots,
            num_speculative_tokens=plan.num_speculative_tokens,
            device="cuda",
            greedy=False,
        )
        self.by_slot = {
            "temperature": torch.full((slots,), 0.8, device="cuda"),
            "seeds": torch.arange(slots, device="cuda"),
            "top_k": torch.zeros(slots, dtype=torch.int64, device="cuda"),
            "top_p": torch.ones(slots, device="cuda"),
            "min_p": torch.zeros(slots, device="cuda"),
        }

    def run(self):
        """Draft for all slots, then verify those that this rank owns; returns what it emits."""
        plan, k = self.plan, self.plan.num_speculative_tokens
        slots = torch.arange(plan.max_num_seqs, device="cuda")
        temperature, seeds = self.by_slot["temperature"], self.by_slot["seeds"]
        self.sampler.begin(slots, slots, temperature, seeds)
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (plan.max_num_seqs, plan.vocab_size)
        dtype = getattr(torch, plan.dtype)
        logits = torch.empty(shape, dtype=dtype, device="cuda")
        drafts = []
        for step in range(k):
            logits.normal_(0, 3, generator=generator)
            drafts.append(self.sampler.sample(logits, step, slots + 100 + step))
        del logits
        owned = [s for s in range(plan.max_num_seqs) if owner_of(s, NUM_RANKS) == self.rank]
        mine = torch.tensor(owned, device="cuda")
        rows = torch.empty(len(owned) * (k + 1), plan.vocab_size, dtype=dtype, device="cuda")
        rows.normal_(0, 3, generator=generator)
        output = RejectionSampler("standard", vocab_size=plan.vocab_size)(
            VerifyInputs(
                target_logits=rows,
                draft_tokens=torch.stack(drafts, 1)[mine],
                idx_mapping=mine,
                cu_num_logits=torch.arange(len(owned) + 1, device="cuda") * (k + 1),
                positions=mine * 0 + 100,
                expanded_idx_mapping=mine.repeat_interleave(k + 1),
                has_cutoffs=False,
                draft_logits=self.cache,
                **self.by_slot,
            )
        )
        return torch.stack(drafts, 1), output


def test_the_peak_of_a_round_falls_by_what_the_plan_says_sharding_frees():
    peaks, results, plans = {}, {}, {}
    for sharding in ("off", "auto"):
        plans[sharding] = plan_of(sharding)
        Round(plans[sharding], 1).run()  # compiles
        torch.cuda.empty_cache()
        with Peak() as peak:
            results[sharding] = Round(plans[sharding], 1).run()
        peaks[sharding] = peak.num_bytes
    planned = {
        sharding: plan.bytes_per_rank + plan.side_bytes_per_rank for sharding, plan in plans.items()
    }
    freed = planned["off"] - planned["auto"]
    assert plans["auto"].freed_bytes_per_rank > 2**29
    assert abs(peaks["off"] - peaks["auto"] - freed) <= ALLOCATOR_BLOCK
    (drafts, output), (sharded_drafts, sharded_output) = results["off"], results["auto"]
    assert torch.equal(drafts, sharded_drafts)
    assert all(map(torch.equal, output, sharded_output))


def test_shards_of_one_process_hold_the_replicated_cache_between_them():
    sizes = {"max_num_seqs": 37, "vocab_size": 49_152, "k": 3}
    whole = Round(plan_of("off", **sizes), 0)
    drafts, _ = whole.run()
    for rank in range(NUM_RANKS):
        part = Round(plan_of("auto", **sizes), rank)
        assert torch.equal(part.run()[0], drafts)
        for slot in range(rank, 37, NUM_RANKS):
            for name in ("logits", "temperature", "logsumexp", "state"):
                row = getattr(part.cache, name)[slot // NUM_RANKS]
                assert torch.equal(row, getattr(whole.cache, name)[slot])
