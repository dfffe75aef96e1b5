"""The pool that target and draft layers share."""

from __future__ import annotations

import pytest
import torch

from specreg.capabilities import KVLayerSpec
from specreg.errors import PluginError, TensorError
from specreg.runtime.kv_pool import KVPool
from specreg.speculator import KVRows

TARGET = (KVLayerSpec(2, 8), KVLayerSpec(1, 16, sliding_window=5))
DRAFT = (KVLayerSpec(3, 4, dtype="float64"),)


def make_pool(num_blocks: int = 7) -> KVPool:
    return KVPool(
        TARGET + DRAFT,
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=3,
        max_model_len=18,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def causal(slot: int, start: int, end: int) -> KVRows:
    positions = torch.arange(start, end)
    return KVRows.causal(torch.full_like(positions, slot), positions)


def test_a_block_costs_the_same_bytes_on_paper_and_in_memory() -> None:
    pool = make_pool()
    per_block = KVPool.block_bytes(TARGET + DRAFT, 4, torch.float32)
    assert per_block == 2 * 4 * (2 * 8 * 4 + 1 * 16 * 4 + 3 * 4 * 8)
    assert pool.nbytes == (pool.num_blocks + 1) * per_block
    assert pool.block_table.shape == (3, 5)


def test_block_ids_count_from_zero_and_never_meet_the_null_block() -> None:
    pool = make_pool()
    pool.assign([(1, 0, [0, 6]), (2, 0, [3]), (1, 2, [2])])
    assert pool.block_table.tolist() == [[0, 0, 0, 0, 0], [1, 7, 3, 0, 0], [4, 0, 0, 0, 0]]


def test_a_new_request_forgets_the_blocks_of_the_slots_last_one() -> None:
    pool = make_pool()
    pool.assign([(1, 0, [0, 1, 2])])
    pool.assign([(1, 0, [5])])
    assert pool.block_table[1].tolist() == [6, 0, 0, 0, 0]
    pool.assign([])
    assert pool.block_table[1].tolist() == [6, 0, 0, 0, 0]


def test_the_last_of_several_updates_of_a_slot_in_one_plan_holds() -> None:
    pool = make_pool()
    pool.assign([(1, 0, [0, 1, 2]), (1, 0, [4]), (1, 1, [6])])
    assert pool.block_table[1].tolist() == [5, 7, 0, 0, 0]


def test_values_may_have_heads_of_another_size_than_keys() -> None:
    layers = [KVLayerSpec(2, 8, value_head_dim=6)]
    pool = KVPool(
        layers,
        num_blocks=3,
        block_size=4,
        max_num_seqs=1,
        max_model_len=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.assign([(0, 0, [1])])
    assert pool.nbytes == 4 * KVPool.block_bytes(layers, 4, torch.float32)
    rows = causal(0, 0, 3)
    pool.view().write(0, rows, torch.ones(3, 2, 8), torch.full((3, 2, 6), 2.0))
    out = pool.view().attend(0, torch.ones(3, 4, 8), rows, scale=1.0)
    assert torch.equal(out, torch.full((3, 4, 6), 2.0))


def test_views_number_their_layers_from_zero_over_shared_memory() -> None:
    pool = make_pool()
    pool.assign([(0, 0, [2, 0])])
    rows = causal(0, 3, 6)
    key, value = torch.randn(3, 3, 4).double(), torch.randn(3, 3, 4).double()
    pool.view(len(TARGET)).write(0, rows, key, value)
    assert torch.equal(pool.keys[2][3, 3], key[0])
    assert torch.equal(pool.values[2][1, :2], value[1:])
    assert not pool.keys[0].any()


def test_slots_do_not_see_each_other() -> None:
    pool = make_pool()
    pool.assign([(0, 0, [2, 0]), (2, 0, [4])])
    view = pool.view()
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(3, 2, 8, generator=generator) for _ in range(3))
    rows = causal(0, 0, 3)
    view.write(0, rows, key, value)
    alone = view.attend(0, query, rows, scale=0.3)
    view.write(0, causal(2, 0, 3), key + 5, value - 5)
    assert torch.equal(view.attend(0, query, rows, scale=0.3), alone)


def test_a_position_written_again_is_overwritten() -> None:
    pool = make_pool()
    pool.assign([(0, 0, [1])])
    view = pool.view()
    generator = torch.Generator().manual_seed(0)
    key, value, query = (torch.randn(4, 2, 8, generator=generator) for _ in range(3))
    view.write(0, causal(0, 0, 4), key, value)
    expected = view.attend(0, query, causal(0, 0, 4), scale=0.3)
    view.write(0, causal(0, 2, 4), key[2:] * 9, value[2:] * 9)
    assert not torch.allclose(view.attend(0, query, causal(0, 0, 4), scale=0.3), expected)
    view.write(0, causal(0, 2, 4), key[2:], value[2:])
    assert torch.equal(view.attend(0, query, causal(0, 0, 4), scale=0.3), expected)


def test_a_position_without_a_block_is_refused_and_nothing_is_written() -> None:
    pool = make_pool()
    pool.assign([(0, 0, [1])])
    with pytest.raises(TensorError, match="no block to go to"):
        pool.view().write(0, causal(0, 3, 5), torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert not pool.keys[0].any()


def test_a_read_only_view_attends_and_refuses_to_write() -> None:
    pool = make_pool()
    pool.assign([(0, 0, [1])])
    view = pool.view(is_read_only=True)
    with pytest.raises(PluginError, match="cannot be written"):
        view.write(0, causal(0, 0, 2), torch.ones(2, 2, 8), torch.ones(2, 2, 8))
    assert not view.attend(0, torch.ones(2, 2, 8), causal(0, 0, 2), scale=1.0).any()


def test_an_unknown_element_type_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="unknown element type"):
        KVPool.block_bytes([KVLayerSpec(1, 8, dtype="bf16")], 4, torch.float32)
