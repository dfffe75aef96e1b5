"""Compiling Triton kernels for GPUs that are not there."""

from __future__ import annotations

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}

# A name of MLIR may hold more than a word does: a field of a tuple is `%cache.step_stride`.
_NAME = r"%[\w.$-]+(?:#\d+)?"
_CONSTANT = re.compile(rf"({_NAME}) = arith\.constant ")
_PRODUCT = re.compile(rf"= arith\.muli ({_NAME}), ({_NAME})[^:\n]* : (?:tensor<[\dx]*)?i(\d+)\b")

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_offline(
    kernel: Any,
    target: str,
    /,
    num_warps: int = 4,
    num_stages: int | None = None,
    maxnreg: int | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Every stage of `kernel` for `target`, by name: "ttir", "ptx" and so on.

    Args:
        kernel: a `triton.jit` function.
        target: a key of `TARGETS`.
        num_warps, num_stages, maxnreg: as at launch.
        arguments: what a launch would pass by keyword: tensors (only their dtype counts), numbers,
            tuples of these, None.
    """
    constants: dict[tuple[int, ...], Any] = {}
    signature = {}
    attributes = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        signature[parameter.name] = _type(
            value, (i,), constants, attributes, parameter.is_constexpr
        )
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps}
    if num_stages is not None:
        options["num_stages"] = num_stages
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    return triton.compile(source, target=TARGETS[target], options=options).asm


def narrow_products(ttir: str) -> list[tuple[str, str]]:
    """Factors of the products of 32 bits and fewer that can pass 31 bits: neither is a constant.

    A product with a constant is a block's first column, or a word of Philox.
    """
    constants = set(_CONSTANT.findall(ttir))
    products = [match.groups() for match in _PRODUCT.finditer(ttir)]
    assert len(products) == ttir.count("arith.muli"), "a product that this cannot read"
    return [
        (left, right)
        for left, right, num_bits in products
        if int(num_bits) <= 32 and not {left, right} & constants
    ]


def _type(value, path, constants, attributes, is_constexpr=False) -> Any:
    if isinstance(value, tuple):
        types = [_type(field, (*path, i), constants, attributes) for i, field in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if value is None or is_constexpr or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i64" if abs(value) >= 2**31 else "i32"
