"""`rejection_sample` on a GPU: against the twin at real sizes, addressing, capture, the law."""

from dataclasses import replace

import pytest
import torch
from kernels.verification_cases import make_cache
from real_batches import BF16, FP32, LARGE, agree, real_batch, verify

from specreg.kernels import rejection_sample
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.ownership import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch):
    """The twin works on few chunks, as a GPU likes it."""
    monkeypatch.setattr(rows_reference, "CHUNK_ELEMENTS", 2**26)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_kernel_and_twin_agree_at_a_real_size(dtype):
    batch = real_batch(dtype=dtype)
    output = agree(batch, LARGE)
    assert 1.5 < output.num_sampled.float().mean() < 6
    agree(batch._replace(cache=None), LARGE)


@pytest.mark.parametrize("vocab_size", [1, 513, 49_152, 151_936])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_kernel_and_twin_agree_at_odd_sizes(vocab_size, num_drafts):
    batch = real_batch(9, num_drafts, vocab_size, draft_dtype=FP32, shard=Shard())
    temperature = batch.temperature.clone()
    temperature[::4] = 0.0
    drafts = batch.draft_tokens.clone()
    drafts[1, 0], drafts[2, -1] = -1, vocab_size
    state = batch.cache.state.clone()
    state[batch.idx_mapping[3], 0] = 0
    idx_mapping = batch.idx_mapping.clone()
    idx_mapping[5] = -1
    counts = torch.full((9,), num_drafts + 1, device="cuda")
    counts[6], counts[7] = 0, 1
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    mixed = batch._replace(
        temperature=temperature,
        draft_tokens=drafts,
        idx_mapping=idx_mapping,
        cu_num_logits=cu,
        cache=replace(batch.cache, state=state),
    )
    agree(mixed, vocab_size)
    agree(mixed._replace(cache=None), vocab_size)


def test_values_that_are_no_numbers_agree_with_the_twin():
    batch = real_batch(8, 3, 10_000, shard=Shard())
    target = batch.target_logits.clone()
    target[0], target[5], target[9] = float("nan"), float("-inf"), float("inf")
    target[16:20, ::7] = float("nan")
    target[24:28, 100:] = float("-inf")
    output = agree(batch._replace(target_logits=target), 10_000)
    assert output.num_nans.tolist() == [1, 1, 0, 0, 4, 0, 0, 0]
    assert ((output.sampled >= -1) & (output.sampled < 10_000)).all()
    greedy = batch._replace(target_logits=target, temperature=batch.temperature * 0)
    agree(greedy, 10_000)


def test_targets_and_caches_of_more_than_2_to_the_31_elements_are_addressed_with_64_bits():
    vocab_size, num_drafts, last_slot = 262_144, 7, 1_199
    small = real_batch(1, num_drafts, vocab_size, shard=Shard())
    num_rows, first = 8_208, 8_200
    assert first * vocab_size > 2**31
    target = torch.empty(num_rows, vocab_size, dtype=BF16, device="cuda")
    target[first:] = small.target_logits
    cells = torch.empty(last_slot + 1, num_drafts, vocab_size, dtype=BF16, device="cuda")
    assert last_slot * num_drafts * vocab_size > 2**31
    cells[last_slot] = small.cache.logits[0]

    def by_slot(values):
        wide = values.new_zeros(last_slot + 1, *values.shape[1:])
        wide[last_slot] = values[0]
        return wide

    view = small.cache
    large = small._replace(
        target_logits=target,
        idx_mapping=torch.tensor([last_slot], device="cuda"),
        cu_num_logits=torch.tensor([first, num_rows], device="cuda"),
        temperature=by_slot(small.temperature),
        seeds=by_slot(small.seeds),
        cache=replace(
            view,
            logits=cells,
            temperature=by_slot(view.temperature),
            logsumexp=by_slot(view.logsumexp),
            state=by_slot(view.state),
        ),
    )
    missing = torch.full_like(small.draft_tokens, -1)
    for drafts in (small.draft_tokens, missing):
        for temperature in (1.0, 0.0):
            expected = verify(
                small._replace(draft_tokens=drafts, temperature=small.temperature * temperature)
            )
            got = verify(
                large._replace(draft_tokens=drafts, temperature=large.temperature * temperature)
            )
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_tokens_do_not_depend_on_the_batch():
    batch = real_batch(16)
    together = verify(batch)
    for b in (0, 7, 15):
        rows = slice(8 * b, 8 * b + 8)
        alone = batch._replace(
            target_logits=batch.target_logits[rows],
            draft_tokens=batch.draft_tokens[b : b + 1],
            idx_mapping=batch.idx_mapping[b : b + 1],
            cu_num_logits=batch.cu_num_logits[:2],
            positions=batch.positions[b : b + 1],
        )
        assert torch.equal(verify(alone).sampled[0], together.sampled[b])


def test_nothing_synchronises_with_the_host():
    batch = real_batch(8, 3, 10_000)
    verify(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(batch)
        verify(batch._replace(temperature=batch.temperature))
        rejection_sample(*batch[:-1], None, vocab_size=10_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_replays_on_new_inputs():
    first, second = (real_batch(8, 3, 10_000, seed=seed) for seed in (0, 1))
    expected = verify(second)
    verify(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = verify(first)
    for static, fresh in zip(first[:-1], second[:-1], strict=True):
        static.copy_(fresh)
    for name in ("logits", "temperature", "logsumexp", "state"):
        getattr(first.cache, name).copy_(getattr(second.cache, name))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(output, expected, strict=True))


def test_the_first_token_follows_the_target():
    """Chi-square with 4 degrees of freedom over 20,000 seeds: 23.5 is exceeded once in 10^4."""
    num_seeds = 20_000
    p = torch.tensor([0.05, 0.15, 0.25, 0.25, 0.30], device="cuda")
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04], device="cuda")
    slots = torch.arange(num_seeds, device="cuda")
    ones = torch.ones(num_seeds, device="cuda")
    cache = make_cache(num_seeds, 1, 5, device="cuda")
    logits = q.log().expand(num_seeds, 5).contiguous()
    drafts = draft_sample(logits, slots, slots * 0, slots * 0 + 3, ones, slots, cache, vocab_size=5)
    output = rejection_sample(
        p.log().expand(2 * num_seeds, 5).contiguous(),
        drafts[:, None],
        slots,
        torch.arange(num_seeds + 1, device="cuda") * 2,
        slots * 0 + 3,
        ones,
        slots,
        cache,
        vocab_size=5,
    )
    counts = torch.bincount(output.sampled[:, 0], minlength=5).double()
    expected = p.double() * num_seeds
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5
    accepted = float((output.num_sampled == 2).double().mean())
    assert abs(accepted - 0.44) < 5 * (0.44 * 0.56 / num_seeds) ** 0.5
