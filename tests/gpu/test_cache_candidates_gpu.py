"""`cache_candidates` on a GPU, against its twin at real sizes."""

import pytest
import torch
from candidates_cases import DENSE, TOP_K, make_candidates

from specreg.draft_logits import DraftLogitsCache
from specreg.kernels import cache_candidates
from specreg.kernels.cache_candidates.reference import cache_candidates_reference
from specreg.ownership import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

FIELDS = ("logits", "temperature", "state", "ids")


def on_gpu(batch):
    return batch._replace(**{name: tensor.cuda() for name, tensor in batch._asdict().items()})


def gpu_cache(layout, max_num_seqs, num_steps, k, vocab_size, shard):
    width = vocab_size if layout is DENSE else k
    rows = -(-max_num_seqs // shard.num_shards)
    logits = torch.empty(rows, num_steps, width, device="cuda")
    return DraftLogitsCache(logits, shard, layout, vocab_size, num_candidates=k)


@pytest.mark.parametrize("k", [1, 4, 16, 64, 128])
def test_the_kernel_agrees_with_its_twin_over_two_proposals_in_both_layouts(k):
    """Draws that rounding of exp can tip over may differ: one in a thousand at most."""
    vocab_size, num_reqs, num_steps = 151_936, 48, 3
    temperature = [(0.0, 0.3, 0.7, 1.0, 1.5)[slot % 5] for slot in range(num_reqs)]
    drawn = {}
    for layout in (DENSE, TOP_K):
        for shard in (Shard(), Shard(4, 1)):
            sizes = (layout, num_reqs, num_steps, k, vocab_size, shard)
            cache, twin = gpu_cache(*sizes), gpu_cache(*sizes)
            for seed in range(2):
                batch = on_gpu(
                    make_candidates(
                        list(range(num_reqs)),
                        k,
                        vocab_size,
                        num_steps=num_steps,
                        temperature=temperature,
                        seed=seed,
                    )
                )
                tokens = cache_candidates(*batch, cache.view(), vocab_size=vocab_size)
                expected = cache_candidates_reference(
                    *batch, twin.view(), vocab_size=vocab_size, num_nans=None
                )
                assert int((tokens != expected).sum()) <= 1
                assert torch.equal(drawn.setdefault(seed, tokens), tokens)
                for field in FIELDS:
                    assert torch.equal(getattr(cache, field), getattr(twin, field))
                torch.testing.assert_close(cache.logsumexp, twin.logsumexp, rtol=2e-6, atol=2e-6)


def test_i5_a_dense_cache_of_more_than_2_31_elements_works():
    """Only the last row and the row where 32-bit offsets would land are touched."""
    vocab_size, k = 151_936, 16
    rows = 2**31 // vocab_size + 8
    last = rows - 1
    wrapped = slice(last * vocab_size - 2**31, last * vocab_size - 2**31 + vocab_size)
    batch = on_gpu(make_candidates([0], k, vocab_size))
    batch = batch._replace(scores=batch.scores.bfloat16().float())
    small = gpu_cache(DENSE, 1, 1, k, vocab_size, Shard())
    tokens = cache_candidates(*batch, small.view(), vocab_size=vocab_size)

    logits = torch.empty(rows, 1, vocab_size, dtype=torch.bfloat16, device="cuda")
    large = DraftLogitsCache(logits, Shard(), DENSE, vocab_size, num_candidates=k)
    large.logits.view(-1)[wrapped] = 7.25
    high = batch._replace(
        idx_mapping=torch.tensor([last], device="cuda"),
        temperature=torch.ones(rows, device="cuda"),
        seeds=batch.seeds.expand(rows).contiguous(),
    )
    assert torch.equal(cache_candidates(*high, large.view(), vocab_size=vocab_size), tokens)
    assert torch.equal(large.logits[last].float(), small.logits[0])
    assert torch.equal(large.ids[last], small.ids[0])
    assert bool((large.logits.view(-1)[wrapped] == 7.25).all())
