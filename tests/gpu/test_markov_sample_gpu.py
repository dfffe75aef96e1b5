"""`markov_sample` on a GPU: against its twin and the loop at real sizes, alone and replayed.

Needs torch, Triton and pytest alone: `pytest -m gpu --confcutdir tests/gpu tests/gpu`.
"""

import dataclasses

import pytest
import torch
from draft_sample_cases import POISON, make_cache
from markov_sample_cases import Batch, draw_step, loop, make_markov_batch, step_logits

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels import markov_sample
from specreg.ownership import Shard, owner_of, shard_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CELL_FIELDS = ("logits", "temperature", "logsumexp", "state")
VOCAB_SIZE, RANK, NUM_STEPS = 129_280, 256, 5


def real_batch(num_reqs, dtype=BF16, num_columns=VOCAB_SIZE, vocab_size=VOCAB_SIZE, seed=1):
    """Normal logits and tables of unit bias, made on the device; temperatures mixed by slot."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, std):
        return (torch.randn(shape, generator=generator, device="cuda") * std).to(dtype)

    slots = torch.arange(num_reqs, device="cuda")
    temperature = torch.tensor([1.0, 0.7, 0.0, 0.3, 1.5], device="cuda")
    return Batch(
        base_logits=normal(num_reqs, NUM_STEPS, num_columns, std=3),
        anchors=slots * 17 + 5,
        idx_mapping=slots,
        positions=slots * 100,
        w1=normal(vocab_size, RANK, std=1),
        w2=normal(num_columns, RANK, std=RANK**-0.5),
        temperature=temperature[slots % 5].contiguous(),
        seeds=slots * 12345 - 2**61,
    )


def gpu_cache(max_num_seqs, num_steps, width, shard=Shard(), dtype=BF16, **kwargs):  # noqa: B008
    cache = make_cache(max_num_seqs, num_steps, width, shard, dtype, **kwargs)
    return dataclasses.replace(cache, **{name: getattr(cache, name).cuda() for name in CELL_FIELDS})


def assert_within_rounding(stored, expected, base):
    """One unit in the last place of the bias and one of the logits, and rarely that."""
    unit = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 2.0**-18}[stored.dtype]
    exact, stored, base = expected.float(), stored.float(), base.float()
    allowed = unit * (exact.abs() + (exact - base).abs()) + 2.0**-20
    assert float(((stored - exact).abs() / allowed).max()) <= 1.0
    if expected.dtype is not FP32:
        assert float((stored != exact).float().mean()) < 0.02


@pytest.mark.parametrize(
    ("num_reqs", "dtype"), [(1, BF16), (8, BF16), (9, FP16), (64, BF16), (8, FP32), (100, BF16)]
)
def test_rows_are_the_twins_and_tokens_those_of_the_rows_on_one_rank_and_on_four(num_reqs, dtype):
    """Each step is compared given the kernel's own tokens: a last bit may change what follows."""
    batch = real_batch(num_reqs, dtype)
    whole = gpu_cache(num_reqs, NUM_STEPS, VOCAB_SIZE, dtype=dtype)
    tokens = markov_sample(*batch, whole, vocab_size=VOCAB_SIZE)
    again = gpu_cache(num_reqs, NUM_STEPS, VOCAB_SIZE, dtype=dtype)
    previous = batch.anchors
    for step in range(NUM_STEPS):
        stored = whole.logits[:, step]
        expected = step_logits(batch, step, previous)
        assert_within_rounding(stored, expected, batch.base_logits[:, step])
        previous = draw_step(batch, step, stored, again, vocab_size=VOCAB_SIZE)
        assert torch.equal(tokens[:, step], previous)
    for field in CELL_FIELDS:
        assert torch.equal(getattr(whole, field), getattr(again, field)), field
    for rank in (0, 3):
        part = gpu_cache(num_reqs, NUM_STEPS, VOCAB_SIZE, Shard(4, rank), dtype)
        assert torch.equal(markov_sample(*batch, part, vocab_size=VOCAB_SIZE), tokens)
        for slot in range(rank, num_reqs, 4):
            assert owner_of(slot, 4) == rank
            for field in CELL_FIELDS:
                row = getattr(part, field)[shard_row(slot, 4)]
                assert torch.equal(row, getattr(whole, field)[slot])
    assert torch.equal(markov_sample(*batch, None, vocab_size=VOCAB_SIZE), tokens)


@pytest.mark.parametrize(
    ("num_reqs", "rank", "dtype"),
    [
        (1, 256, BF16),
        (9, 256, BF16),
        (33, 256, BF16),
        (64, 256, BF16),
        (130, 256, BF16),
        (9, 16, BF16),
        (130, 16, BF16),
        (9, 100, FP16),
        (33, 64, FP32),
    ],
)
def test_a_bias_without_rounding_gives_the_bits_of_the_loop(num_reqs, rank, dtype):
    slots = [slot if slot % 7 != 3 else -1 for slot in range(num_reqs)]
    batch = make_markov_batch(
        slots,
        3001,
        rank=rank,
        dtype=dtype,
        max_num_seqs=num_reqs,
        temperature=[(1.0, 0.0, 0.5)[slot % 3] for slot in range(num_reqs)],
    ).to("cuda")
    for shard in (Shard(), Shard(2, 1)):
        caches = [gpu_cache(num_reqs, 3, 3001, shard, dtype) for _ in range(2)]
        tokens = markov_sample(*batch, caches[0], vocab_size=3001)
        assert torch.equal(tokens, loop(batch, caches[1], vocab_size=3001))
        for field in CELL_FIELDS:
            assert torch.equal(*(getattr(cache, field) for cache in caches)), field
    greedy = markov_sample(*batch, None, vocab_size=3001, greedy=True)
    assert torch.equal(greedy, loop(batch, None, vocab_size=3001, greedy=True))


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_a_single_step_is_that_of_the_loop_with_and_without_a_cache(shard):
    batch = make_markov_batch(list(range(9)), 3001, num_steps=1, rank=64, dtype=BF16).to("cuda")
    caches = [gpu_cache(9, 1, 3001, shard) for _ in range(2)]
    tokens = markov_sample(*batch, caches[0], vocab_size=3001)
    assert torch.equal(tokens, loop(batch, caches[1], vocab_size=3001))
    for field in CELL_FIELDS:
        assert torch.equal(*(getattr(cache, field) for cache in caches)), field
    assert torch.equal(markov_sample(*batch, None, vocab_size=3001), tokens)
    greedy = markov_sample(*batch, None, vocab_size=3001, greedy=True)
    assert torch.equal(greedy, loop(batch, None, vocab_size=3001, greedy=True))


def test_i7_a_request_alone_and_among_others_draws_the_same_tokens_from_the_same_bits():
    batch = real_batch(80)
    cache = gpu_cache(80, NUM_STEPS, VOCAB_SIZE)
    tokens = markov_sample(*batch, cache, vocab_size=VOCAB_SIZE)
    for rows in ([3], [64, 9, 0], list(range(79, -1, -1))[:24], list(range(40, 80))):
        other = gpu_cache(80, NUM_STEPS, VOCAB_SIZE)
        assert torch.equal(
            markov_sample(*batch.rows(rows), other, vocab_size=VOCAB_SIZE), tokens[rows]
        )
        assert torch.equal(other.logits[rows], cache.logits[rows])
        assert torch.equal(other.logsumexp[rows], cache.logsumexp[rows])


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_a_reduced_vocabulary_gives_the_tokens_of_the_loop_in_both_layouts(shard):
    vocab_size, num_columns = 20_000, 3200
    batch = make_markov_batch(
        list(range(9)), num_columns, vocab_size=vocab_size, rank=64, dtype=BF16
    ).to("cuda")
    target_ids = torch.randperm(vocab_size, device="cuda")[:num_columns]
    tokens = []
    for layout in (DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB):
        width = vocab_size if layout is DraftLogitsLayout.DENSE else num_columns
        caches = [
            DraftLogitsCache(
                torch.zeros(-(-9 // shard.num_shards), 3, width, dtype=BF16, device="cuda"),
                shard,
                layout,
                vocab_size,
                target_ids=target_ids,
            ).view()
            for _ in range(2)
        ]
        options = {"vocab_size": vocab_size, "target_ids": target_ids}
        tokens.append(markov_sample(*batch, caches[0], **options))
        assert torch.equal(tokens[-1], loop(batch, caches[1], **options))
        for field in CELL_FIELDS:
            assert torch.equal(*(getattr(cache, field) for cache in caches)), field
    assert torch.equal(*tokens)


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_logits_narrower_than_the_vocabulary_fill_their_cells_as_the_loop_does(shard):
    batch = make_markov_batch(list(range(40)), 3001, vocab_size=5000, rank=64, dtype=BF16)
    batch = batch.to("cuda")
    caches = [gpu_cache(40, 3, 5000, shard, padding=24) for _ in range(2)]
    tokens = markov_sample(*batch, caches[0], vocab_size=5000)
    assert torch.equal(tokens, loop(batch, caches[1], vocab_size=5000))
    for field in CELL_FIELDS:
        assert torch.equal(*(getattr(cache, field) for cache in caches)), field
    assert bool((caches[0].logits[0, :, 3001:] == -torch.inf).all())


@pytest.mark.parametrize("greedy", [False, True])
def test_odd_logits_and_a_capped_and_scaled_bias_are_those_of_the_loop(greedy):
    batch = make_markov_batch(
        list(range(9)), 1100, dtype=BF16, temperature=[1, 1, 1, 1, 0, 0, 1, 0.1, 1e-6]
    ).to("cuda")
    x = batch.base_logits[:, 1]
    x[0, 700] = torch.nan
    x[1] = torch.nan
    x[2] = -torch.inf
    x[3, [3, 900]] = torch.inf
    x[5, 512:] = -torch.inf
    x[6, :600] = torch.finfo(BF16).min
    x[7, 40] = -x[0, 700]
    counts = [torch.zeros(9, dtype=torch.int32, device="cuda") for _ in range(2)]
    caches = [None if greedy else gpu_cache(9, 3, 1100) for _ in range(2)]
    options = {"vocab_size": 1100, "greedy": greedy, "scale": 2.0, "soft_cap": 6.0}
    tokens = markov_sample(*batch, caches[0], num_nans=counts[0], **options)
    assert torch.equal(tokens, loop(batch, caches[1], num_nans=counts[1], **options))
    assert torch.equal(*counts)
    assert int(counts[0].sum()) >= 4
    if not greedy:
        for field in CELL_FIELDS:
            first, second = (getattr(cache, field) for cache in caches)
            torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shard", [Shard(), Shard(2, 1)], ids=str)
def test_a_graph_replayed_with_fewer_requests_equals_eager_runs(shard):
    """Captured with 24 requests, replayed many times with other tokens, then with 5 and padding."""
    vocab_size = 20_000
    batch = make_markov_batch(list(range(24)), vocab_size, rank=256, dtype=BF16).to("cuda")
    cache = gpu_cache(24, 3, vocab_size, shard)
    markov_sample(*batch, cache, vocab_size=vocab_size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = markov_sample(*batch, cache, vocab_size=vocab_size)
    for replay in range(30):
        batch.anchors.copy_((batch.anchors * 7 + replay) % vocab_size)
        batch.positions.add_(3)
        graph.replay()
        assert torch.equal(tokens, markov_sample(*batch, None, vocab_size=vocab_size))

    slots = [3, 0, 6, 1, 4] + [-1] * 19
    batch.idx_mapping.copy_(torch.tensor(slots))
    cache.logits.fill_(POISON)
    cache.state.zero_()
    graph.replay()
    assert torch.equal(tokens, markov_sample(*batch, None, vocab_size=vocab_size))
    assert bool((tokens[5:] == -1).all())
    owned = {shard.row(slot) for slot in slots if shard.owns(slot)}
    for row in range(cache.num_rows):
        is_poison = bool((cache.logits[row] == POISON).all())
        assert is_poison == (row not in owned)
        assert bool((cache.state[row] == (0 if is_poison else 1)).all())


def test_i5_a_cache_of_more_than_2_31_elements_works():
    rows = 2**31 // (NUM_STEPS * VOCAB_SIZE) + 8
    batch = real_batch(1)._replace(temperature=torch.ones(1, device="cuda"))
    small = gpu_cache(1, NUM_STEPS, VOCAB_SIZE)
    tokens = markov_sample(*batch, small, vocab_size=VOCAB_SIZE)
    large = DraftLogitsCache(
        torch.full((rows, NUM_STEPS, VOCAB_SIZE), POISON, dtype=BF16, device="cuda"),
        Shard(),
        DraftLogitsLayout.DENSE,
        VOCAB_SIZE,
    ).view()
    high = batch._replace(
        idx_mapping=torch.tensor([rows - 1], device="cuda"),
        temperature=torch.ones(rows, device="cuda"),
        seeds=batch.seeds.expand(rows).contiguous(),
    )
    assert torch.equal(markov_sample(*high, large, vocab_size=VOCAB_SIZE), tokens)
    assert torch.equal(large.logits[-1], small.logits[0])
    assert bool((large.logits[:-1] == POISON).all())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_sampling_never_waits_for_the_host():
    batch = make_markov_batch(list(range(4)), 3000, dtype=BF16).to("cuda")
    cache = gpu_cache(4, 3, 3000)
    markov_sample(*batch, cache, vocab_size=3000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        markov_sample(*batch, cache, vocab_size=3000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
