"""`draft_sample` on a GPU: against its twin at real sizes, and what only a GPU can show.

Needs torch, Triton and pytest alone: `pytest -m gpu --confcutdir tests/gpu tests/gpu`.
"""

import dataclasses

import pytest
import torch
from draft_sample_cases import POISON, distance_to_boundary, make_batch, make_cache

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.kernels import draft_sample
from specreg.kernels.draft_sample import reference
from specreg.ownership import Shard, owner_of, shard_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CELL_FIELDS = ("logits", "temperature", "logsumexp", "state")


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 2**27)


def on_gpu(batch):
    return batch._replace(**{name: tensor.cuda() for name, tensor in batch._asdict().items()})


def real_batch(num_reqs, num_steps, vocab_size, dtype):
    """`make_batch` with its logits made on the device."""
    temperature = [(0.0, 0.3, 0.7, 1.0, 1.5)[slot % 5] for slot in range(num_reqs)]
    batch = on_gpu(
        make_batch(list(range(num_reqs)), 1, num_steps=num_steps, temperature=temperature)
    )
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (num_reqs * num_steps, vocab_size)
    logits = torch.randn(shape, generator=generator, device="cuda", dtype=FP32).mul_(3)
    return batch._replace(logits=logits.to(dtype))


def gpu_cache(*args, **kwargs):
    cache = make_cache(*args, **kwargs)
    return dataclasses.replace(cache, **{name: getattr(cache, name).cuda() for name in CELL_FIELDS})


def empty_cache(max_num_seqs, num_steps, vocab_size, shard, dtype):
    rows = -(-max_num_seqs // shard.num_shards)
    logits = torch.empty(rows, num_steps, vocab_size, dtype=dtype, device="cuda")
    return DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size).view()


def twin(batch, cache, vocab_size, target_ids=None, num_nans=None):
    return reference.draft_sample_reference(
        *batch, cache, vocab_size=vocab_size, target_ids=target_ids, num_nans=num_nans
    )


def assert_agree(batch, ids, cache, twin_ids, twin_cache, vocab_size):
    """Equal bytes in the cache; equal tokens, but for draws that rounding of exp can tip over."""
    differs = ids != twin_ids
    assert float(differs.float().mean()) < 0.005
    if bool(differs.any()):
        rows = differs.nonzero().flatten().tolist()
        distance = distance_to_boundary(batch.rows(rows), cache.logits.dtype, vocab_size)
        assert float(distance.max()) < 2e-6
    assert torch.equal(cache.logits, twin_cache.logits)
    assert torch.equal(cache.temperature, twin_cache.temperature)
    assert torch.equal(cache.state, twin_cache.state)
    torch.testing.assert_close(cache.logsumexp, twin_cache.logsumexp, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("num_reqs", "num_steps", "vocab_size", "dtype", "cache_dtype"),
    [
        (256, 7, 248_320, BF16, BF16),
        (64, 7, 248_320, FP32, FP32),
        (64, 5, 129_280, FP16, FP16),
        (32, 3, 151_936, FP32, BF16),
        (33, 2, 50_257, BF16, FP32),
    ],
)
def test_the_kernel_agrees_with_its_twin_at_real_sizes_on_one_rank_and_on_four(
    num_reqs, num_steps, vocab_size, dtype, cache_dtype
):
    batch = real_batch(num_reqs, num_steps, vocab_size, dtype)
    sizes = (num_reqs, num_steps, vocab_size)
    whole = empty_cache(*sizes, Shard(), cache_dtype)
    ids = draft_sample(*batch, whole, vocab_size=vocab_size)
    expected = empty_cache(*sizes, Shard(), cache_dtype)
    twin_ids = twin(batch, expected, vocab_size)
    assert_agree(batch, ids, whole, twin_ids, expected, vocab_size)

    parts = [empty_cache(*sizes, Shard(4, rank), cache_dtype) for rank in range(4)]
    for part in parts:
        assert torch.equal(draft_sample(*batch, part, vocab_size=vocab_size), ids)
    for slot in range(num_reqs):
        part, row = parts[owner_of(slot, 4)], shard_row(slot, 4)
        for field in CELL_FIELDS:
            assert torch.equal(getattr(part, field)[row], getattr(whole, field)[slot])


@pytest.mark.parametrize("vocab_size", [1, 513, 8193, 10_000])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_odd_logits_agree_with_the_twin(vocab_size, dtype):
    batch = make_batch(
        list(range(9)), vocab_size, dtype=dtype, temperature=[1, 1, 1, 1, 0, 0, 1, 0.1, 1]
    )
    x = batch.logits
    x[0, vocab_size // 2] = torch.nan
    x[1] = torch.nan
    x[2] = -torch.inf
    x[3, [0, vocab_size - 1]] = torch.inf
    x[4] = 1.0
    x[5, : vocab_size // 2] = -torch.inf
    x[6, vocab_size // 2 :] = torch.finfo(dtype).min
    x[7, -1] = -x[0, vocab_size // 2]  # a NaN with its sign set
    batch = on_gpu(batch)
    counts = [torch.zeros(9, dtype=torch.int32, device="cuda") for _ in range(2)]
    cache, expected = gpu_cache(9, 1, vocab_size), gpu_cache(9, 1, vocab_size)
    ids = draft_sample(*batch, cache, vocab_size=vocab_size, num_nans=counts[0])
    twin_ids = twin(batch, expected, vocab_size, num_nans=counts[1])
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(ids, twin_ids)
    assert torch.equal(cache.state, expected.state)
    torch.testing.assert_close(cache.logits, expected.logits, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.logsumexp, expected.logsumexp, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_a_reduced_vocabulary_agrees_with_the_twin_in_both_layouts(shard):
    vocab_size, num_columns = 151_936, 32_000
    batch = real_batch(16, 3, num_columns, BF16)
    target_ids = torch.randperm(vocab_size, device="cuda")[:num_columns]
    tokens = []
    for layout in (DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB):
        width = vocab_size if layout is DraftLogitsLayout.DENSE else num_columns
        cache, expected = (
            DraftLogitsCache(
                torch.empty(16 // shard.num_shards, 3, width, dtype=BF16, device="cuda"),
                shard,
                layout,
                vocab_size,
                target_ids=target_ids,
            ).view()
            for _ in range(2)
        )
        ids = draft_sample(*batch, cache, vocab_size=vocab_size, target_ids=target_ids)
        twin_ids = twin(batch, expected, vocab_size, target_ids=target_ids)
        assert float((ids != twin_ids).float().mean()) < 0.05
        assert torch.equal(cache.logits, expected.logits)
        assert torch.equal(cache.state, expected.state)
        tokens.append(ids)
    assert torch.equal(tokens[0], tokens[1])


def test_greedy_drafts_are_the_argmax():
    batch = real_batch(64, 2, 151_936, BF16)
    ids = draft_sample(*batch, None, vocab_size=151_936, greedy=True)
    stored = batch.logits.float()
    assert torch.equal(stored.gather(1, ids[:, None])[:, 0], stored.amax(-1))
    first = (stored == stored.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(ids, first)


def test_tokens_do_not_depend_on_row_batch_alignment_or_stride():
    """Alignment changes how Triton lays a block out over threads, and so the order of its sums."""
    vocab_size = 50_257
    batch = real_batch(9, 1, vocab_size, BF16)
    cache = empty_cache(9, 1, vocab_size, Shard(), BF16)
    ids = draft_sample(*batch, cache, vocab_size=vocab_size)
    for offset, width in ((0, 50_304), (1, 50_305), (7, 50_270)):
        buffer = torch.full((9, width), POISON, dtype=BF16, device="cuda")
        moved = buffer[:, offset : offset + vocab_size]
        moved.copy_(batch.logits)
        other = empty_cache(9, 1, vocab_size, Shard(), BF16)
        moved_ids = draft_sample(*batch._replace(logits=moved), other, vocab_size=vocab_size)
        assert torch.equal(moved_ids, ids)
        assert torch.equal(other.logsumexp, cache.logsumexp)
    for row in range(9):
        alone = empty_cache(9, 1, vocab_size, Shard(), BF16)
        assert torch.equal(
            draft_sample(*batch.rows([row]), alone, vocab_size=vocab_size), ids[[row]]
        )
        assert torch.equal(alone.logsumexp[row], cache.logsumexp[row])


def test_i5_caches_and_logits_of_more_than_2_31_elements_work():
    """Only the last row and the row where 32-bit offsets would land are touched."""
    vocab_size = 151_936
    rows = 2**31 // vocab_size + 8
    last = rows - 1
    wrapped = slice(last * vocab_size - 2**31, last * vocab_size - 2**31 + vocab_size)
    batch = real_batch(1, 1, vocab_size, BF16)._replace(temperature=torch.ones(1, device="cuda"))
    small = empty_cache(1, 1, vocab_size, Shard(), BF16)
    ids = draft_sample(*batch, small, vocab_size=vocab_size)

    large = empty_cache(rows, 1, vocab_size, Shard(), BF16)
    large.logits.view(-1)[wrapped] = POISON
    high = batch._replace(
        idx_mapping=torch.tensor([last], device="cuda"),
        temperature=torch.ones(rows, device="cuda"),
        seeds=batch.seeds.expand(rows).contiguous(),
    )
    for target_ids in (None, torch.arange(vocab_size, device="cuda")):
        large.logits[last].fill_(POISON)
        high_ids = draft_sample(*high, large, vocab_size=vocab_size, target_ids=target_ids)
        assert torch.equal(high_ids, ids)
        assert torch.equal(large.logits[last], small.logits[0])
        assert torch.equal(large.logsumexp[last], small.logsumexp[0])
        assert bool((large.logits.view(-1)[wrapped] == POISON).all())

    buffer = large.logits.view(rows, vocab_size)
    buffer.view(-1)[wrapped] = 0.0
    buffer[last] = batch.logits[0]
    mapping = torch.full((rows,), -1, device="cuda")
    mapping[last] = 0
    many = batch._replace(
        logits=buffer,
        idx_mapping=mapping,
        steps=torch.zeros_like(mapping),
        positions=batch.positions.expand(rows).contiguous(),
    )
    tokens = draft_sample(*many, None, vocab_size=vocab_size)
    assert int(tokens[last]) == int(ids[0])
    assert bool((tokens[:last] == -1).all())


def test_draws_follow_the_draft_distribution():
    """Chi-square with 4 df, 200,000 draws: reject above 33 (1e-6)."""
    q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04], device="cuda")
    slots = torch.arange(200_000, device="cuda")
    tokens = draft_sample(
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_sampling_never_waits_for_the_host():
    batch = real_batch(4, 1, 1000, BF16)
    cache = DraftLogitsCache(
        torch.empty(4, 1, 1000, dtype=BF16, device="cuda"), Shard(), DraftLogitsLayout.DENSE, 1000
    )
    sampler = sampler_for(cache)
    sampler.begin(batch.idx_mapping, batch.idx_mapping, batch.temperature, batch.seeds)
    sampler.sample(batch.logits, 0, batch.positions)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.begin(batch.idx_mapping, batch.idx_mapping, batch.temperature, batch.seeds)
        tokens = sampler.sample(batch.logits, 0, batch.positions)
        sampler.proposal_hash(tokens[:, None])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sampler_for(cache):
    rows, num_steps, vocab_size = cache.logits.shape
    return DraftSampler(
        cache=cache,
        vocab_size=vocab_size,
        max_num_seqs=rows * cache.num_shards,
        num_speculative_tokens=num_steps,
        device="cuda",
        greedy=False,
    )


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1), Shard(4, 2)], ids=str)
def test_a_graph_replayed_with_padding_rows_writes_only_its_own_cells(shard):
    """Captured and replayed with eight requests, then with five and three rows of padding."""
    vocab_size = 3000
    batch = real_batch(8, 1, vocab_size, BF16)
    rows = -(-8 // shard.num_shards)
    logits = torch.full((rows, 2, vocab_size), POISON, dtype=BF16, device="cuda")
    cache = DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size)
    sampler = sampler_for(cache)
    mapping = batch.idx_mapping.clone()
    sampler.begin(mapping, mapping, batch.temperature, batch.seeds)
    sampler.sample(batch.logits, 0, batch.positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(batch.logits, 0, batch.positions)
    graph.replay()
    eager = draft_sample(*batch, None, vocab_size=vocab_size)
    assert torch.equal(tokens, eager)

    slots = [3, 0, 6, 1, 4, -1, -1, -1]
    mapping.copy_(torch.tensor(slots))
    cache.logits.fill_(POISON)
    cache.state.zero_()
    graph.replay()
    assert tokens[5:].tolist() == [-1] * 3
    owned = {shard.row(slot) for slot in slots if shard.owns(slot)}
    assert set((cache.state[:, 0] == 1).nonzero().flatten().tolist()) == owned
    for row in range(rows):
        is_poison = bool((cache.logits[row, 0] == POISON).all())
        assert is_poison == (row not in owned)
    assert bool((cache.logits[:, 1] == POISON).all())
