"""Paged attention against dense attention in double precision, and what the write op stores."""

from __future__ import annotations

import pytest
import torch
from paged_attention_cases import BLOCK_SIZE, Paged, ragged_rows, rows_of

from specreg.errors import TensorError
from specreg.kernels.paged_attention.op import paged_attention, write_kv

RAGGED, OFFSETS = ragged_rows()
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_ragged_packed_queries_equal_dense_attention(
    dtype: torch.dtype, sinks: bool, soft_cap: float | None, window: int | None
) -> None:
    paged = Paged(dtype=dtype)
    query = paged.query(len(RAGGED[0]))
    options = {
        "scale": 0.31,
        "sliding_window": window,
        "soft_cap": soft_cap,
        "sinks": torch.linspace(-2, 2, 6) if sinks else None,
    }
    out = paged_attention(
        query, paged.key_pool, paged.value_pool, paged.block_table, *RAGGED, **options
    )
    expected = paged.dense(query, *RAGGED, **options)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "broken",
    [
        {"sliding_window": 8},
        {"sliding_window": 6},
        {"sliding_window": None},
        {"soft_cap": None},
        {"sinks": None},
        {"scale": 0.30},
    ],
)
def test_the_comparison_notices_each_option(broken: dict[str, object]) -> None:
    # Largest difference, in the order above: 0.57, 0.71, 1.2, 0.61, 1.8, 0.010
    paged = Paged()
    query = paged.query(len(RAGGED[0]))
    right = {
        "scale": 0.31,
        "sliding_window": 7,
        "soft_cap": 0.7,
        "sinks": torch.linspace(-2, 2, 6),
    }
    out = paged_attention(
        query, paged.key_pool, paged.value_pool, paged.block_table, *RAGGED, **(right | broken)
    )
    assert (out.double() - paged.dense(query, *RAGGED, **right)).abs().max() > 5e-3


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "value_head_dim"),
    [(1, 1, 1, 1), (5, 1, 3, 3), (4, 4, 7, 7), (6, 3, 64, 64), (4, 2, 12, 5)],
)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_grouped_heads_of_any_size_equal_dense_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, value_head_dim: int, soft_cap: float | None
) -> None:
    paged = Paged(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        table_dtype=torch.int32,
    )
    query = paged.query(len(RAGGED[0]))
    out = paged_attention(
        query,
        paged.key_pool,
        paged.value_pool,
        paged.block_table,
        *RAGGED,
        scale=0.2,
        soft_cap=soft_cap,
    )
    expected = paged.dense(query, *RAGGED, scale=0.2, soft_cap=soft_cap)
    assert (out.double() - expected).abs().max() < 5e-6


def test_a_non_causal_block_sees_its_own_end() -> None:
    paged = Paged()
    rows = rows_of((2, [9, 10, 11, 12, 13]), visible=14)
    query = paged.query(5)
    out = paged_attention(
        query, paged.key_pool, paged.value_pool, paged.block_table, *rows, scale=0.3
    )
    assert (out.double() - paged.dense(query, *rows, scale=0.3)).abs().max() < 2e-6


def test_neither_company_nor_order_nor_the_offsets_hint_change_a_row() -> None:
    paged = Paged()
    query = paged.query(len(RAGGED[0]))
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    together = paged_attention(query, *pools, *RAGGED, scale=0.3, query_start_loc=OFFSETS)
    order = torch.randperm(len(query), generator=torch.Generator().manual_seed(2))
    shuffled = paged_attention(query[order], *pools, *(r[order] for r in RAGGED), scale=0.3)
    assert (together[order] - shuffled).abs().max() < 1e-6


def test_padding_rows_are_zero_even_over_poisoned_memory() -> None:
    paged = Paged()
    paged.block_table.fill_(0)
    rows = rows_of((-1, [0, 5, 10**6]))
    out = paged_attention(
        paged.query(3), paged.key_pool, paged.value_pool, paged.block_table, *rows, scale=1.0
    )
    assert torch.equal(out, torch.zeros_like(out))


def test_blocks_outside_the_visible_keys_are_not_read() -> None:
    paged = Paged()
    query = paged.query(1)
    rows = rows_of((1, [17]))
    expected = paged.dense(query, *rows, scale=0.3, sliding_window=6)  # keys 12..17: blocks 3, 4
    dead = [b for i, b in enumerate(paged.block_table[1].tolist()) if i not in (3, 4)]
    paged.key_pool[dead], paged.value_pool[dead] = float("nan"), float("nan")
    paged.block_table[1, 5:] = 10**6
    out = paged_attention(
        query,
        paged.key_pool,
        paged.value_pool,
        paged.block_table,
        *rows,
        scale=0.3,
        sliding_window=6,
    )
    assert (out.double() - expected).abs().max() < 2e-6


def test_write_stores_live_rows_and_leaves_every_other_cell_alone() -> None:
    paged = Paged()
    key_before, value_before = paged.key_pool.clone(), paged.value_pool.clone()
    slots, positions = torch.tensor([2, -1, 0, 2]), torch.tensor([7, -5, 0, 39])
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    write_kv(paged.key_pool, paged.value_pool, paged.block_table, slots, positions, key, value)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        cell = int(paged.block_table[slot, position // BLOCK_SIZE]), position % BLOCK_SIZE
        assert torch.equal(paged.key_pool[cell], key[row])
        assert torch.equal(paged.value_pool[cell], value[row])
        key_before[cell], value_before[cell] = key[row], value[row]
    assert torch.equal(paged.key_pool[1:].nan_to_num(7e7), key_before[1:].nan_to_num(7e7))
    assert torch.equal(paged.value_pool[1:].nan_to_num(7e7), value_before[1:].nan_to_num(7e7))


def test_what_was_written_is_what_is_attended_to() -> None:
    paged = Paged()
    rows = rows_of((3, [4, 5, 6]))
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(paged.key_pool, paged.value_pool, paged.block_table, *rows[:2], key, value)
    paged.dense_keys[3, 4:7], paged.dense_values[3, 4:7] = key, value
    query = paged.query(3)
    out = paged_attention(
        query, paged.key_pool, paged.value_pool, paged.block_table, *rows, scale=0.3
    )
    assert (out.double() - paged.dense(query, *rows, scale=0.3)).abs().max() < 2e-6


def test_tensors_that_do_not_fit_are_refused_with_what_to_pass() -> None:
    paged = Paged()
    pools = (paged.key_pool, paged.value_pool, paged.block_table)
    rows = rows_of((0, [0, 1]))
    query = paged.query(2)
    with pytest.raises(TensorError, match="do not fit each other"):
        paged_attention(query[..., :7], *pools, *rows, scale=1.0)
    with pytest.raises(TensorError, match="differ in dtype or device"):
        paged_attention(query.double(), *pools, *rows, scale=1.0)
    with pytest.raises(TensorError, match="not integers of 64 bits"):
        paged_attention(query, *pools, rows[0].int(), *rows[1:], scale=1.0)
    with pytest.raises(TensorError, match="cannot be grouped"):
        paged_attention(query[:, :5], *pools, *rows, scale=1.0)
    with pytest.raises(TensorError, match="sinks do not fit"):
        paged_attention(query, *pools, *rows, scale=1.0, sinks=torch.zeros(5))
    with pytest.raises(TensorError, match="hides every key"):
        paged_attention(query, *pools, *rows, scale=1.0, sliding_window=0)
    with pytest.raises(TensorError, match="not told for every query"):
        paged_attention(query, *pools, *rows[:2], rows[2][:1], scale=1.0)
    with pytest.raises(TensorError, match="not where the pools are"):
        paged_attention(query, *pools, *rows[:2], rows[2].to("meta"), scale=1.0)
    transposed = paged.key_pool.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(TensorError, match="stride 1 in the last dimension"):
        paged_attention(query, transposed, *pools[1:], *rows, scale=1.0)
    with pytest.raises(TensorError, match="do not fit the pool"):
        write_kv(*pools, *rows[:2], torch.zeros(2, 3, 8), torch.zeros(2, 3, 8))
