"""`paged_attention` and `write_kv` on a GPU: against the twin in double precision at real sizes,
and what only a GPU can show.

Needs torch, Triton and pytest alone: `pytest -m gpu --confcutdir tests/gpu tests/gpu`.
"""

from functools import partial
from itertools import accumulate

import pytest
import torch

from specreg.kernels.paged_attention import paged_attention, write_kv
from specreg.kernels.paged_attention.reference import (
    paged_attention_reference,
    write_kv_reference,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FP32: 2e-6, FP16: 1e-3, BF16: 6e-3}  # of the norm; a bf16 rounding is 2e-3 of it


class Pool:
    """Random keys and values in shuffled blocks; a slot a request."""

    def __init__(self, num_slots, max_keys, heads, dims, dtype, block_size=16):
        torch.manual_seed(0)
        (self.num_heads, num_kv_heads), (self.key_dim, value_dim) = heads, dims
        columns = -(-max_keys // block_size)
        num_blocks = 1 + num_slots * columns
        order = 1 + torch.randperm(num_blocks - 1, device="cuda", dtype=torch.int32)
        self.block_table = order.view(num_slots, columns)
        shape = (num_blocks, block_size, num_kv_heads)
        self.keys = torch.randn(*shape, self.key_dim, device="cuda", dtype=dtype)
        self.values = torch.randn(*shape, value_dim, device="cuda", dtype=dtype)

    def query(self, num_tokens):
        shape = (num_tokens, self.num_heads, self.key_dim)
        return torch.randn(shape, device="cuda", dtype=self.keys.dtype)

    @property
    def tensors(self):
        return self.keys, self.values, self.block_table


def rows_of(*requests):
    """Slots, positions, visible keys and offsets of (slot, first position, number of tokens)."""
    slots = [slot for slot, _, count in requests for _ in range(count)]
    positions = [first + i for _, first, count in requests for i in range(count)]
    slots, positions = torch.tensor([slots, positions], device="cuda")
    offsets = tuple(accumulate((count for *_, count in requests), initial=0))
    return (slots, positions, positions + 1), offsets


def expected(pool, query, rows, **options):
    """The twin in double precision."""
    keys, values, table = pool.tensors
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].double()
    return paged_attention_reference(
        query.double(), keys.double(), values.double(), table, *rows, **options
    )


def assert_agree(out, reference, dtype):
    difference = (out.double() - reference).flatten(1).norm(dim=1)
    assert (
        float((difference / reference.flatten(1).norm(dim=1).clamp(min=1e-9)).max())
        < (TOLERANCE[dtype])
    )


def check(pool, requests, *, kv_lens=None, **options):
    rows, offsets = rows_of(*requests)
    if kv_lens is not None:
        rows = (*rows[:2], kv_lens)
    query = pool.query(len(rows[0]))
    reference = expected(pool, query, rows, **options)
    for hint in (offsets, None):
        torch.full((64, 2**16), torch.nan, device="cuda")  # what the next allocation may reuse
        out = paged_attention(query, *pool.tensors, *rows, **options, query_start_loc=hint)
        assert_agree(out, reference, query.dtype)
        assert torch.equal(out[rows[0] < 0], torch.zeros_like(out[rows[0] < 0]))


@pytest.mark.parametrize(
    ("dtype", "num_queries", "num_reqs"),
    [(BF16, 1, 1), (BF16, 4, 8), (BF16, 8, 48), (FP16, 8, 1), (FP32, 1, 48), (FP32, 8, 8)],
)
def test_a_decode_batch_agrees_with_the_twin(dtype, num_queries, num_reqs):
    pool = Pool(num_reqs, 4096, (32, 8), (128, 128), dtype)
    requests = [(slot, (slot * 997) % 4000, num_queries) for slot in range(num_reqs)]
    check(pool, requests, scale=128**-0.5)


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap", "has_sinks"),
    [
        (BF16, None, None, False),
        (BF16, 128, None, True),
        (BF16, 1, 30.0, False),
        (FP32, 1024, 50.0, True),
    ],
)
def test_a_mixed_batch_agrees_with_the_twin(dtype, window, soft_cap, has_sinks):
    pool = Pool(6, 3000, (24, 4), (64, 64), dtype)
    requests = [(0, 0, 300), (1, 2995, 4), (-1, 0, 3), (2, 700, 1), (3, 0, 1), (4, 2100, 77)]
    sinks = torch.linspace(-3, 6, 24, device="cuda").to(dtype) if has_sinks else None
    check(pool, requests, scale=0.3, sliding_window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize(
    ("heads", "dims", "block_size", "dtype"),
    [
        ((8, 8), (64, 64), 16, FP16),
        ((28, 4), (128, 128), 16, BF16),
        ((5, 1), (80, 80), 6, BF16),
        ((12, 12), (96, 96), 32, FP32),
        ((16, 16), (192, 128), 16, BF16),
        ((40, 1), (256, 256), 64, BF16),
        ((8, 2), (512, 512), 16, BF16),
        ((8, 2), (512, 512), 16, FP32),
        ((4, 2), (8, 6), 4, FP32),
    ],
)
def test_head_layouts_agree_with_the_twin(heads, dims, block_size, dtype):
    pool = Pool(4, 1000, heads, dims, dtype, block_size)
    check(pool, [(0, 990, 5), (1, 0, 5), (2, 300, 5), (3, 17, 5)], scale=dims[0] ** -0.5)
    check(pool, [(0, 0, 100), (3, 900, 1)], scale=dims[0] ** -0.5)


def test_a_non_causal_block_agrees_with_the_twin():
    pool = Pool(2, 1000, (32, 8), (128, 128), BF16)
    kv_lens = torch.tensor([516] * 16 + [816] * 16, device="cuda")
    for window in (None, 64):
        requests = [(0, 500, 16), (1, 800, 16)]
        check(pool, requests, kv_lens=kv_lens, scale=0.1, sliding_window=window)


def test_neither_company_nor_splits_show_in_fp32_and_every_run_gives_the_same_bits():
    from specreg.kernels.paged_attention.kernel import paged_attention_triton

    pool = Pool(8, 8192, (32, 8), (128, 128), FP32)
    rows, offsets = rows_of(*((slot, 8000 - 900 * slot, 4) for slot in range(8)))
    query = pool.query(32)
    options = {"scale": 0.1, "query_start_loc": offsets}
    outs = [
        paged_attention_triton(query, *pool.tensors, *rows, **options, num_splits=count)
        for count in (1, 2, 8, 32, 32)
    ]
    assert torch.equal(outs[3], outs[4])
    for out in outs[1:]:
        assert float((out - outs[0]).abs().max()) < 2e-6
    one = tuple(part[:4] for part in rows)
    alone = paged_attention_triton(
        query[:4], *pool.tensors, *one, scale=0.1, query_start_loc=(0, 4), num_splits=8
    )
    assert torch.equal(alone, outs[2][:4])


def test_a_pool_of_more_than_2_to_the_31_elements_is_read_and_written_at_its_end():
    num_blocks, block_size, heads, dim = 140_000, 16, 8, 128
    keys = torch.empty(num_blocks, block_size, heads, dim, dtype=BF16, device="cuda")
    values = torch.empty_like(keys)
    assert keys.numel() > 2**31
    blocks = torch.arange(num_blocks - 64, num_blocks, device="cuda", dtype=torch.int32)
    table = blocks.flip(0).view(1, 64).contiguous()
    positions = torch.arange(1024, device="cuda")
    slots = torch.zeros_like(positions)
    key, value = torch.randn(2, 1024, heads, dim, device="cuda").to(BF16)
    write_kv(keys, values, table, slots, positions, key, value)
    assert torch.equal(keys[blocks.flip(0).long()].flatten(0, 1), key)
    query = torch.randn(4, 32, dim, device="cuda").to(BF16)
    rows = (slots[:4], positions[-4:], positions[-4:] + 1)
    out = paged_attention(query, keys, values, table, *rows, scale=0.1)
    dense = key[None].view(64, 16, heads, dim), value.view(64, 16, heads, dim)
    reference = paged_attention_reference(
        query.double(),
        *(part.double() for part in dense),
        torch.arange(64, device="cuda")[None],
        *rows,
        scale=0.1,
    )
    assert_agree(out, reference, BF16)


@pytest.mark.parametrize(("dtype", "dims"), [(FP32, (80, 48)), (BF16, (128, 128))])
def test_writes_store_what_the_twin_stores(dtype, dims):
    pool = Pool(5, 512, (8, 8), dims, dtype)
    slots = torch.tensor([4, 0, -1, 2, 4], device="cuda")
    positions = torch.tensor([511, 0, -7, 33, 16], device="cuda")
    key = torch.randn(8, 5, dims[0], device="cuda", dtype=dtype).transpose(0, 1)
    value = torch.randn(5, 8, dims[1], device="cuda", dtype=dtype)
    twin = [tensor.clone() for tensor in pool.tensors]
    write_kv(*pool.tensors, slots, positions, key, value)
    write_kv_reference(*twin, slots, positions, key, value)
    for ours, theirs in zip(pool.tensors[:2], twin[:2], strict=True):
        assert torch.equal(ours[1:], theirs[1:])


def test_nothing_synchronises_and_a_graph_replays_with_other_lengths():
    pool = Pool(8, 4096, (32, 8), (128, 128), BF16)
    query = pool.query(32)
    all_slots = torch.arange(8, device="cuda").repeat_interleave(4)
    slots = all_slots.clone()
    positions = torch.zeros(32, dtype=torch.int64, device="cuda")
    offsets = tuple(range(0, 33, 4))
    ragged = (0, 1, *offsets[2:])

    def run(hint=offsets):
        write_kv(*pool.tensors, slots, positions, query[:, :8], query[:, :8])
        rows = (slots, positions, positions + 1)
        return paged_attention(query, *pool.tensors, *rows, scale=0.1, query_start_loc=hint)

    run(ragged)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(ragged)
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
        ragged_out = run(ragged)
    for first in (5, 4000, 100):
        positions.copy_(first + torch.arange(4, device="cuda").repeat(8))
        slots.copy_(all_slots)
        slots[8:] = -1 if first == 4000 else all_slots[8:]
        pool.keys.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
        assert float((ragged_out.float() - replayed.float()).abs().max()) < 2e-2


def graph_us(run, repeats=20):
    """Least microseconds of `run` in a CUDA graph, which leaves launch overhead out."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / repeats)
    return min(times)


def test_time_grows_with_the_context_and_not_with_the_longest_request():
    num_reqs = 32
    us = {}
    for longest, context in [(1024, 900), (65_536, 900), (65_536, 8000), (65_536, 64_000)]:
        pool = Pool(num_reqs, longest, (32, 8), (128, 128), BF16)
        rows, offsets = rows_of(*((slot, context, 1) for slot in range(num_reqs)))
        query = pool.query(num_reqs)
        run = partial(paged_attention, query, *pool.tensors, *rows, scale=0.1)
        us[longest, context] = graph_us(partial(run, query_start_loc=offsets))
        del pool, run
    print(us)
    assert us[65_536, 900] < 1.5 * us[1024, 900] + 3
    assert us[65_536, 8000] > 3 * us[65_536, 900]
    assert us[65_536, 64_000] > 5 * us[65_536, 8000]
