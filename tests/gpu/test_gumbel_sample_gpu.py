"""`gumbel_sample` on a GPU, against its twin at real sizes."""

import pytest
import torch
from draft_sample_cases import make_batch

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels import gumbel_sample
from specreg.kernels.gumbel_sample.reference import gumbel_sample_reference
from specreg.ownership import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def real_batch(num_reqs, num_steps, vocab_size, dtype):
    temperature = [(0.0, 0.3, 0.7, 1.0, 1.5)[slot % 5] for slot in range(num_reqs)]
    batch = make_batch(list(range(num_reqs)), 1, num_steps=num_steps, temperature=temperature)
    batch = batch._replace(**{name: tensor.cuda() for name, tensor in batch._asdict().items()})
    shape = (num_reqs * num_steps, vocab_size)
    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(shape, generator=generator, device="cuda", dtype=FP32).mul_(3)
    return batch._replace(logits=logits.to(dtype))


def cache_for(num_reqs, num_steps, vocab_size, shard, dtype):
    logits = torch.zeros(
        -(-num_reqs // shard.num_shards), num_steps, vocab_size, dtype=dtype, device="cuda"
    )
    return DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size).view()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("num_reqs", "num_steps", "vocab_size"), [(16, 7, 248_320), (33, 2, 50_257)]
)
@pytest.mark.parametrize("shard", [Shard(), Shard(4, 2)], ids=str)
def test_the_kernel_agrees_with_its_twin_at_real_sizes(
    num_reqs, num_steps, vocab_size, dtype, shard
):
    """Scores that differ in their last bits may change places: one draw in 200 at most."""
    batch = real_batch(num_reqs, num_steps, vocab_size, dtype)
    sizes = (num_reqs, num_steps, vocab_size, shard, dtype)
    cache, twin = cache_for(*sizes), cache_for(*sizes)
    ids = gumbel_sample(*batch, cache, vocab_size=vocab_size)
    expected = gumbel_sample_reference(
        *batch,
        twin,
        vocab_size=vocab_size,
        target_ids=None,
        num_nans=None,
        noise_steps=batch.steps,
    )
    assert int((ids != expected).sum()) <= 1
    assert torch.equal(cache.logits, twin.logits)
    assert torch.equal(cache.temperature, twin.temperature)
    assert torch.equal(cache.state, twin.state)
    torch.testing.assert_close(cache.logsumexp, twin.logsumexp, rtol=2e-6, atol=2e-6)


def test_draws_follow_the_draft_distribution():
    """Chi-square with 4 df, 200,000 draws: reject above 33 (1e-6)."""
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04], device="cuda")
    slots = torch.arange(200_000, device="cuda")
    tokens = gumbel_sample(
        q.log().expand(len(slots), -1).contiguous(),
        slots,
        slots * 0,
        slots * 0 + 3,
        torch.ones(len(slots), device="cuda"),
        slots,
        None,
        vocab_size=5,
    )
    expected = len(slots) * q
    assert float(((torch.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()) < 33
