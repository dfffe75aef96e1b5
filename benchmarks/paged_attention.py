"""What does attention over paged keys and values cost, against the bytes that must move?

Checks each case against the torch twin in double precision, then times it with CUDA events: medians
over repeated runs, launched one by one and replayed from a CUDA graph. The limit is each live key
and value once over the bandwidth of a device-to-device copy measured in the same run (bytes read
and written). Block tables are as wide as `MAX_MODEL_LEN` asks in every case, so the column of
microseconds shows that time follows the context.

    python benchmarks/paged_attention.py [--json FILE] [--sweep]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import copy_bytes_per_us, graph_of, median_us
from torch import Tensor

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


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    arguments, options = make(case)
    check(case, arguments, options)
    keys = min(case.context, (case.sliding_window or case.context) + case.num_queries - 1)
    cell_bytes = 2 * case.num_kv_heads * case.head_dim * case.dtype.itemsize
    live_bytes = case.num_reqs * keys * cell_bytes

    def run() -> None:
        paged_attention(*arguments, **options)

    launched = median_us(run)
    replayed = median_us(graph_of(run).replay)
    limit = live_bytes / bandwidth
    return {
        **{key: value for key, value in case._asdict().items() if key != "dtype"},
        "dtype": str(case.dtype).removeprefix("torch."),
        "us": round(replayed, 1),
        "eager_us": round(launched, 1),
        "live_kv_mb": round(live_bytes / 1e6, 1),
        "limit_us": round(limit, 1),
        "ratio": round(replayed / limit, 2),
    }


def replay_us(given: tuple[tuple[Tensor, ...], dict[str, Any]]) -> str:
    """Median microseconds in a graph; the error's name where a size does not fit the device."""
    arguments, options = given
    run = functools.partial(paged_attention, *arguments, **options)
    try:
        run()
        return f"{median_us(graph_of(run).replay, 20):12.1f}"
    except Exception as error:
        return f"{type(error).__name__[:12]:>12s}"


def sweep() -> None:
    """Microseconds for other sizes of a program than `program_shape` gives, and other splits."""
    from specreg.kernels.paged_attention import kernel, sizes

    cases = [Case(64, 1, 4096), Case(64, 8, 4096), Case(1, 8, 16_384)]
    given = [make(case) for case in cases]
    print("requests, queries, context:", *(tuple(case[:3]) for case in cases))
    chosen = kernel.program_shape

    def resized(*lanes: int) -> sizes.ProgramShape:
        return sizes.ProgramShape(*chosen(*lanes)[:2], *size)

    kernel.program_shape = resized
    print("keys warps stages")
    for size in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
        print("{:4d} {:5d} {:6d}".format(*size), *map(replay_us, given))
    kernel.program_shape = chosen
    print("programs a processor")
    for sizes.PROGRAMS_PER_PROCESSOR in (1, 2, 4, 8):
        print(f"{sizes.PROGRAMS_PER_PROCESSOR:17d}", *map(replay_us, given))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    parser.add_argument("--sweep", action="store_true", help="time program sizes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    if options.sweep:
        return sweep()
    bandwidth = copy_bytes_per_us()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {bandwidth / 1e6:.2f} TB/s")
    print(
        "reqs queries context window  heads   dim dtype         us    graph  KV MB    limit ratio"
    )
    rows = []
    for case in CASES:
        row = measure(case, bandwidth)
        rows.append(row)
        window = row["sliding_window"] or "-"
        print(
            f"{row['num_reqs']:4d} {row['num_queries']:7d} {row['context']:7d} {window:>6} "
            f"{row['num_heads']:3d}/{row['num_kv_heads']:<2d} {row['head_dim']:5d} "
            f"{row['dtype']:8s} {row['eager_us']:7.1f} {row['us']:8.1f} {row['live_kv_mb']:6.0f} "
            f"{row['limit_us']:8.1f} {row['ratio']:5.2f}"
        )
    if options.json:
        result = {"device": device, "copy_tb_per_s": bandwidth / 1e6, "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
