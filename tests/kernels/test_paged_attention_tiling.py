"""Which tokens share a program of paged attention, and how large programs are."""

from itertools import pairwise

import pytest
import torch

from specreg.kernels.paged_attention.sizes import lanes_of, program_shape
from specreg.kernels.paged_attention.tiling import tile_tokens

CPU = torch.device("cpu")


def tiles(offsets, most, num_tokens=None):
    """Token ranges of the tiles."""
    num_tokens = offsets[-1] if num_tokens is None else num_tokens
    tiling = tile_tokens(offsets, num_tokens, most, CPU)
    if tiling.starts is None:
        size = tiling.num_tokens
        starts = [*range(0, num_tokens, size), num_tokens]
    else:
        starts = tiling.starts.tolist()
    assert len(starts) == tiling.num_tiles + 1
    assert max(b - a for a, b in pairwise(starts)) <= tiling.num_tokens
    return starts, tiling.starts is not None


def test_requests_of_equal_length_need_no_table():
    assert tiles((0, 4, 8, 12), 16) == ([0, 4, 8, 12], False)
    assert tiles((0, 1, 2, 3), 16) == ([0, 1, 2, 3], False)
    assert tiles((0, 8, 16), 4) == ([0, 4, 8, 12, 16], False)
    assert tiles((0, 15, 30), 8) == ([0, 5, 10, 15, 20, 25, 30], False)
    assert tiles((0, 512), 16)[1] is False


def test_ragged_requests_are_cut_where_they_begin():
    assert tiles((0, 5, 6, 6, 9), 4) == ([0, 4, 5, 6, 9], True)
    assert tiles((0, 0, 3), 4) == ([0, 3], True)
    assert tiles((0, 17), 16) == ([0, 16, 17], True)  # 17 is prime


@pytest.mark.parametrize("offsets", [None, (0,), (1, 4), (0, 3), (0, 5), (0, 4, 3, 4)])
def test_offsets_that_do_not_span_the_batch_group_nothing(offsets):
    assert tiles(offsets, 16, num_tokens=4) == ([0, 1, 2, 3, 4], False)


def test_one_token_a_tile_when_more_do_not_fit():
    assert tiles((0, 4, 8), 1) == (list(range(9)), False)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("lanes", [16, 64, 128, 256, 512])
def test_a_program_holds_at_least_one_token_and_sixteen_rows(lanes, itemsize):
    for group in (1, 3, 4, 8, 40, 64, 128):
        shape = program_shape(group, lanes, itemsize)
        assert 1 <= shape.heads <= min(group, shape.rows)
        assert 16 <= lanes_of(shape.rows // shape.heads * shape.heads) <= shape.rows
