"""`paged_attention` and `write_kv` in Triton's interpreter against their torch twins.

Dead keys hold NaN and `torch.empty` is poisoned, so that whatever is read or left unwritten by
mistake shows. The interpreter has no bf16 matrix product: that type is tested in `tests/gpu`.
"""

import pytest
import torch
from paged_attention_cases import Paged, ragged_rows, rows_of

from specreg.kernels.paged_attention import kernel, sizes
from specreg.kernels.paged_attention.kernel import paged_attention_triton
from specreg.kernels.paged_attention.reference import (
    paged_attention_reference,
    write_kv_reference,
)
from specreg.kernels.paged_attention.write.kernel import write_kv_triton

FP32, FP16 = torch.float32, torch.float16
TOLERANCE = {FP32: 3e-6, FP16: 4e-3}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """A split takes 16 keys or more, so that short requests have several."""
    monkeypatch.setattr(kernel, "KEYS_PER_SPLIT", kernel.tl.constexpr(16))


def agree(paged, rows, *, hint=None, num_splits=1, **options):
    """Kernel and twin over the same pools; returns the kernel's result."""
    query = paged.query(len(rows[0]))
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    out = paged_attention_triton(
        query, *pools, *rows, **options, query_start_loc=hint, num_splits=num_splits
    )
    expected = paged_attention_reference(query, *pools, *rows, **options)
    assert out.dtype == query.dtype
    assert float((out.double() - expected.double()).abs().max()) < TOLERANCE[query.dtype]
    assert torch.equal(out[rows[0] < 0], torch.zeros_like(out[rows[0] < 0]))
    return out


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (0.7, True)])
def test_ragged_rows_agree_with_the_twin(window, soft_cap, has_sinks, num_splits):
    paged = Paged(num_heads=6, num_kv_heads=2, head_dim=12, value_head_dim=20)
    rows, hint = ragged_rows()
    sinks = torch.linspace(-2, 2, 6) if has_sinks else None
    paged.hide_unseen(rows, window)
    options = {"scale": 0.31, "sliding_window": window, "soft_cap": soft_cap, "sinks": sinks}
    agree(paged, rows, hint=hint, num_splits=num_splits, **options)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_head_dim"),
    [(1, 1, 1, 1), (5, 1, 80, 80), (7, 7, 16, 16), (20, 1, 64, 64), (2, 1, 192, 128)],
)
def test_head_layouts_agree_with_the_twin(num_heads, num_kv_heads, head_dim, value_head_dim):
    paged = Paged(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        table_dtype=torch.int32,
    )
    rows, hint = ragged_rows()
    paged.hide_unseen(rows, None)
    agree(paged, rows, hint=hint, num_splits=2, scale=0.2)


def test_half_precision_agrees_with_the_twin():
    paged = Paged(dtype=FP16, head_dim=32, value_head_dim=32)
    rows, hint = ragged_rows()
    sinks = torch.linspace(-2, 2, 6).to(FP16)
    agree(paged, rows, hint=hint, num_splits=2, scale=0.2, sinks=sinks)


def test_a_non_causal_block_sees_its_own_end():
    paged = Paged()
    rows = rows_of((2, [9, 10, 11, 12, 13]), visible=14)
    paged.hide_unseen(rows, None)
    agree(paged, rows, hint=(0, 5), scale=0.3)
    agree(paged, rows, hint=(0, 5), scale=0.3, sliding_window=3)


@pytest.mark.parametrize("hint", [None, (0, 4, 8), (0, 3, 8), (0, 8), (0, 5), (0, 8, 4, 8), (1, 8)])
def test_no_offsets_change_a_result_not_even_wrong_ones(hint):
    paged = Paged()
    rows = rows_of((3, [5, 6, 7, 8]), (1, [20, 21, 22, 23]))
    agree(paged, rows, hint=hint, scale=0.3)


def test_neither_company_nor_tile_length_shows_while_splits_stay():
    paged = Paged()
    rows, hint = ragged_rows()
    together = agree(paged, rows, hint=hint, num_splits=2, scale=0.3)
    query = paged.query(len(rows[0]))
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    for at in range(len(query)):
        row = tuple(part[at : at + 1] for part in rows)
        alone = paged_attention_triton(query[at : at + 1], *pools, *row, scale=0.3, num_splits=2)
        assert float((alone - together[at : at + 1]).abs().max()) < 1e-6


def test_a_position_beyond_the_table_is_neither_read_nor_written():
    paged = Paged()
    paged.block_table = paged.block_table[:, :4]  # of 10 columns: memory behind it exists
    rows = rows_of((1, [14, 15, 30]))
    out = paged_attention_triton(
        paged.query(3), paged.key_pool, paged.value_pool, paged.block_table, *rows, scale=0.3
    )
    assert out.isfinite().all()
    before = paged.key_pool[1:].clone()
    new = torch.zeros(3, 2, 8)
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    write_kv_triton(*pools, *rows[:2], new, new)
    changed = (paged.key_pool[1:] != before).flatten(1).any(1).nonzero().flatten()
    assert (1 + changed).tolist() == [int(paged.block_table[1, 3])]


@pytest.mark.parametrize(("num_heads", "head_dim", "value_head_dim"), [(2, 8, 8), (3, 20, 5)])
def test_writes_store_what_the_twin_stores(num_heads, head_dim, value_head_dim):
    slots, positions = torch.tensor([2, -1, 0, 2]), torch.tensor([7, -5, 0, 39])
    stored = []
    # As attention layers pass them: heads first in memory, tokens first in shape.
    key = torch.randn(num_heads, 4, head_dim).transpose(0, 1)
    value = torch.randn(4, value_head_dim, num_heads).transpose(1, 2)
    for write in (write_kv_triton, write_kv_reference):
        paged = Paged(
            num_kv_heads=num_heads,
            num_heads=num_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
        )
        pools = (paged.key_pool, paged.value_pool, paged.block_table)
        write(*pools, slots, positions, key, value)
        stored.append([pool[1:].nan_to_num(7e7) for pool in pools[:2]])
    assert all(map(torch.equal, *stored))


def test_an_empty_batch_launches_nothing():
    paged = Paged()
    rows = rows_of()
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    assert paged_attention_triton(paged.query(0), *pools, *rows, scale=1.0).shape == (0, 6, 8)
    write_kv_triton(*pools, *rows[:2], torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))


def test_splits_are_a_power_of_two_within_their_bounds():
    device = torch.device("cpu")
    for num_programs in (0, 1, 3, 500):
        for max_keys in (1, 256, 257, 5000, 10**6):
            count = sizes.num_splits(num_programs, max_keys, device)
            assert count & (count - 1) == 0
            assert 1 <= count <= min(32, -(-max_keys // 256))
