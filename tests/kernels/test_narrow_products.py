"""The check that addresses are computed with 64 bits notices where they are not."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from offline import compile_offline, narrow_products

CONSTANT = tl.constexpr(512)


class Cells(NamedTuple):
    data: torch.Tensor
    step_stride: int


@triton.jit
def _wide_kernel(cells, steps):
    step = tl.load(steps + tl.program_id(0) * CONSTANT).to(tl.int64)
    tl.store(cells.data + step * cells.step_stride, 0)


@triton.jit
def _narrow_kernel(cells, steps):
    step = tl.load(steps + tl.program_id(0))
    tl.store(cells.data + step * cells.step_stride, 0)


@triton.jit
def _narrow_vector_kernel(cells, steps):
    lanes = tl.arange(0, 16)
    step = tl.load(steps + lanes)
    tl.store(cells.data + step * cells.step_stride + lanes, 0)


@pytest.mark.parametrize(
    ("kernel", "num_narrow"), [(_wide_kernel, 0), (_narrow_kernel, 1), (_narrow_vector_kernel, 1)]
)
def test_a_narrow_product_with_a_field_of_a_tuple_is_noticed(kernel, num_narrow):
    integers = torch.empty(1, dtype=torch.int32)
    arguments = {"cells": Cells(integers, 248_321), "steps": integers}
    ttir = compile_offline(kernel, "sm_90", **arguments)["ttir"]
    assert len(narrow_products(ttir)) == num_narrow
    assert num_narrow == 0 or "cells.step_stride" in ttir
