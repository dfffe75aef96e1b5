"""What does attention over paged keys and values cost, against the bytes that must move?

Checks each case against the torch twin in double precision, then times it: replayed from a CUDA
graph, launched one by one, and each launch alone. The limit is each live key
and value once over the bandwidth of a device-to-device copy measured in the same run (bytes read
and written). Block tables are as wide as `MAX_MODEL_LEN` asks in every case, so the column of
microseconds shows that time follows the context.

    python benchmarks/paged_attention.py [--json FILE] [--sweep]
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from timing import graph_of, measure, median_us, run_script
from torch import Tensor

from specreg.kernels.paged_attention import arguments as arguments_module
from specreg.kernels.paged_attention import paged_attention
from specreg.kernels.paged_attention.reference import paged_attention_reference

MAX_MODEL_LEN = 131_072
BLOCK_SIZE = 16
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A batch of requests of one context length.

    `num_queries` is the tokens of a request: 1 while drafting, K + 1 in verification.
    """

    num_reqs: int
    num_queries: int
    context: int
    dtype: torch.dtype = BF16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    sliding_window: int | None = None

    @property
    def shape(self) -> dict[str, Any]:
        """The case as columns of a table."""
        dtype = str(self.dtype).removeprefix("torch.")
        return self._asdict() | {"dtype": dtype, "sliding_window": self.sliding_window or "-"}

    def __str__(self) -> str:
        window, dtype = self.shape["sliding_window"], self.shape["dtype"]
        return (
            f"{self.num_reqs:4d} {self.num_queries:7d} {self.context:7d} {window:>6} "
            f"{self.num_heads:3d}/{self.num_kv_heads:<2d} {self.head_dim:5d} {dtype:8s}"
        )


CASES = [
    *(Case(64, 1, context) for context in (256, 1024, 4096, 16_384)),
    *(Case(64, 8, context) for context in (256, 1024, 4096, 16_384)),
    *(Case(1, 8, context) for context in (256, 1024, 4096, 16_384, 131_000)),
    *(Case(8, 4, context) for context in (1024, 16_384)),
    Case(256, 8, 2048),
    Case(64, 4, 16_384, sliding_window=1024),
    Case(64, 4, 4096, num_heads=16, num_kv_heads=8, head_dim=256),
    Case(64, 4, 4096, num_heads=16, num_kv_heads=1, head_dim=512),
    Case(64, 4, 4096, num_heads=16, num_kv_heads=16, head_dim=64),
    Case(64, 4, 1024, dtype=FP32),
]


def make(case: Case) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of `paged_attention`: blocks shuffled, a slot a request."""
    torch.manual_seed(0)
    columns = -(-case.context // BLOCK_SIZE)
    num_blocks = case.num_reqs * columns
    shape = (1 + num_blocks, BLOCK_SIZE, case.num_kv_heads, case.head_dim)
    pools = [torch.empty(shape, dtype=case.dtype, device="cuda").normal_() for _ in range(2)]
    table = torch.zeros(
        case.num_reqs, MAX_MODEL_LEN // BLOCK_SIZE, dtype=torch.int32, device="cuda"
    )
    order = 1 + torch.randperm(num_blocks, device="cuda", dtype=torch.int32)
    table[:, :columns] = order.view(case.num_reqs, columns)
    slots = torch.arange(case.num_reqs, device="cuda").repeat_interleave(case.num_queries)
    newest = torch.arange(case.context - case.num_queries, case.context, device="cuda")
    positions = newest.repeat(case.num_reqs)
    query = torch.randn(len(slots), case.num_heads, case.head_dim, device="cuda").to(case.dtype)
    options = {
        "scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "query_start_loc": tuple(range(0, len(slots) + 1, case.num_queries)),
    }
    return (query, *pools, table, slots, positions, positions + 1), options


def check(case: Case, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Refuse to time a kernel that disagrees with its twin, on the first and the last request."""
    out = paged_attention(*arguments, **options)
    query, keys, values, table, *rows = arguments
    options = {key: value for key, value in options.items() if key != "query_start_loc"}
    for request in (0, case.num_reqs - 1):
        mine = slice(request * case.num_queries, (request + 1) * case.num_queries)
        blocks = table[request, : -(-case.context // BLOCK_SIZE)].long()
        expected = paged_attention_reference(
            query[mine].double(),
            keys[blocks].double(),
            values[blocks].double(),
            torch.arange(len(blocks), device="cuda")[None],
            torch.zeros_like(rows[0][mine]),
            *(part[mine] for part in rows[1:]),
            **options,
        )
        error = (out[mine].double() - expected).norm() / expected.norm()
        assert float(error) < (6e-3 if case.dtype is BF16 else 3e-6), f"{case}: {float(error)}"


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, options = make(case)
    check(case, arguments, options)
    keys = min(case.context, (case.sliding_window or case.context) + case.num_queries - 1)
    cell_bytes = 2 * case.num_kv_heads * case.head_dim * case.dtype.itemsize
    timing = measure(lambda: paged_attention(*arguments, **options), arguments_module)
    return case.shape | timing.row(case.num_reqs * keys * cell_bytes, bytes_per_us)


def replay_us(given: tuple[tuple[Tensor, ...], dict[str, Any]]) -> str:
    """Median microseconds in a graph; the error's name where a size does not fit the device."""
    arguments, options = given
    run = functools.partial(paged_attention, *arguments, **options)
    try:
        run()
        return f"{median_us(graph_of(run).replay, 20):12.1f}"
    except Exception as error:
        return f"{type(error).__name__[:12]:>12s}"


# Rows, keys, warps and stages of a program, to be tried on a case.
SWEEPS = [
    (Case(64, 1, 4096), itertools.product((16,), (64, 128), (4, 8), (2, 3))),
    (Case(64, 8, 4096), itertools.product((32, 64), (64, 128), (4,), (2, 3))),
    (
        Case(64, 4, 4096, num_heads=16, num_kv_heads=1, head_dim=512),
        [(16, 16, 8, 3), (16, 32, 8, 2), (32, 32, 8, 3), (64, 16, 8, 3), (64, 32, 8, 2)],
    ),
    (
        Case(64, 4, 1024, dtype=FP32),
        [(16, keys, 4, 3, how) for keys in (16, 32, 64) for how in ("ieee", "tf32x3")],
    ),
]


def sweep_cases() -> None:
    """Microseconds for other sizes of a program than `program_shape` gives, and other splits."""
    from specreg.kernels.paged_attention import kernel, sizes

    chosen, number = kernel.program_shape, sizes.PROGRAMS_PER_PROCESSOR
    for case, shapes in SWEEPS:
        given = make(case)
        print(f"{case}: rows keys warps stages")
        for rows, *others in shapes:

            def resized(group: int, *_: int) -> sizes.ProgramShape:
                return sizes.ProgramShape(rows, min(group, rows), *others)  # noqa: B023 - used here

            kernel.program_shape = resized
            print("  ", rows, *others, replay_us(given), flush=True)
        kernel.program_shape = chosen
        print(f"{case}: programs a processor")
        for sizes.PROGRAMS_PER_PROCESSOR in (1, 2, 4):
            print("  ", sizes.PROGRAMS_PER_PROCESSOR, replay_us(given), flush=True)
        sizes.PROGRAMS_PER_PROCESSOR = number
        torch.cuda.empty_cache()


if __name__ == "__main__":
    header = "reqs queries context window  heads   dim dtype   "
    run_script(__doc__, header, CASES, time_case, sweep_cases)
