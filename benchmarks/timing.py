"""How benchmarks take time: by CUDA events, in graphs and one by one."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

GRAPH_REPEATS = 10  # of a single launch, so that it is long against the graph's own cost


class Timing(NamedTuple):
    """Microseconds of a call.

    Attributes:
        us: median of replays from a CUDA graph.
        spread_us: between the first and the last decile of these.
        eager_us: median of calls that are launched one by one, as the device sees them.
        host_us: median of what the host needs for a call before it goes on.
        launches: name and microseconds of each kernel, alone among equals in a graph.
    """

    us: float
    spread_us: float
    eager_us: float
    host_us: float
    launches: tuple[tuple[str, float], ...]

    def row(self, moved_bytes: float, bytes_per_us: float) -> dict[str, Any]:
        """The columns that every benchmark reports, from the bytes that must move."""
        limit_us = moved_bytes / bytes_per_us
        return {
            "host_us": round(self.host_us, 1),
            "eager_us": round(self.eager_us, 1),
            "us": round(self.us, 1),
            "spread_us": round(self.spread_us, 1),
            "moved_mb": round(moved_bytes / 1e6, 3),
            "limit_us": round(limit_us, 2),
            "ratio": round(self.us / limit_us, 2),
            "num_launches": len(self.launches),
            "launches": {name: round(us, 1) for name, us in self.launches},
        }


def event_times_us(run: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each of `repeats` runs on the current stream, after five warm-up runs."""
    for _ in range(5):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, end in zip(marks[::2], marks[1::2], strict=True):
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return [1000.0 * start.elapsed_time(end) for start, end in pairs]


def median_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Median of `event_times_us`."""
    return statistics.median(event_times_us(run, repeats))


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def host_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Median microseconds until `run` returns; the device is idle when it starts."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def copy_bytes_per_us() -> float:
    """Bytes read and written a microsecond by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source), 20)


@contextmanager
def recorded(module: ModuleType) -> Iterator[list[tuple[str, Callable[[], object]]]]:
    """The launches that `module` makes meanwhile, by name, each as a function that repeats it."""
    launch, calls = module.launch, []

    def record(kernel: Any, *arguments: Any, **options: Any) -> None:
        repeat = functools.partial(launch, kernel, *arguments, **options)
        calls.append((kernel.__name__.removesuffix("_kernel"), repeat))
        repeat()

    module.launch = record  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        module.launch = launch  # type: ignore[attr-defined]


def sweep(
    run: Callable[[], object],
    module: ModuleType,
    index: int | None,
    constants: ModuleType,
    sizes: dict[str, tuple[int, ...]],
) -> None:
    """Print microseconds of a call, or one launch of it, for every size of programs, fastest first.

    Args:
        run: the call.
        module: what launches its kernels.
        index: of the launch; None for the whole call, where a launch repeated alone does less.
        constants: the module that holds the sizes.
        sizes: names there, and the values to try.
    """
    before = {name: getattr(constants, name) for name in sizes}
    times = {}
    for values in itertools.product(*sizes.values()):
        vars(constants).update(zip(sizes, values, strict=True))
        try:
            with recorded(module) as calls:
                run()
            name, repeat = ("a call", run) if index is None else calls[index]
            times[values] = launch_us(repeat, 10)
        except Exception as error:  # a size that the device cannot launch
            print(f"    {values}: {type(error).__name__}")
    vars(constants).update(before)
    print(f"  us of {name} by {' x '.join(sizes)}")
    for values, us in sorted(times.items(), key=lambda item: item[1]):
        used = " (used)" if values == tuple(before.values()) else ""
        print(f"    {' x '.join(map(str, values)):8s} {us:8.1f}{used}", flush=True)


def launch_us(repeat: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one launch, or call, among equal ones in a graph."""

    def several() -> None:
        for _ in range(GRAPH_REPEATS):
            repeat()

    times = event_times_us(graph_of(several).replay, repeats)
    return statistics.median(times) / GRAPH_REPEATS


def measure(run: Callable[[], object], module: ModuleType, repeats: int = 40) -> Timing:
    """Time a call whose kernels `module` launches."""
    with recorded(module) as calls:
        run()
    replays = event_times_us(graph_of(run).replay, repeats)
    deciles = statistics.quantiles(replays, n=10)
    return Timing(
        us=statistics.median(replays),
        spread_us=deciles[-1] - deciles[0],
        eager_us=median_us(run, repeats),
        host_us=host_us(run),
        launches=tuple((name, launch_us(repeat)) for name, repeat in calls),
    )


def run_script(
    doc: str,
    header: str,
    cases: Iterable[Any],
    time_case: Callable[[Any, float], dict[str, Any]],
    sweep_cases: Callable[[], None] | None = None,
) -> None:
    """What the command line of a benchmark does.

    Args:
        doc: of the script.
        header: of what a case is as a string.
        cases: what to time.
        time_case: a row of the table, from a case and the bytes a microsecond of a copy.
        sweep_cases: what `--sweep` does instead.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")
    if sweep_cases is not None:
        parser.add_argument("--sweep", action="store_true", help="time program sizes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    if sweep_cases is not None and options.sweep:
        return sweep_cases()
    bytes_per_us = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, copy {bytes_per_us / 1e6:.2f} TB/s")
    print(header + HEADER)
    rows = []
    for case in cases:
        rows.append(time_case(case, bytes_per_us))
        print_row(rows[-1], str(case))
        torch.cuda.empty_cache()
    report(rows, options.json, bytes_per_us)


def report(rows: list[dict[str, Any]], path: str | None, bytes_per_us: float) -> None:
    """Write the rows as JSON to `path`, if there is one."""
    if path is None:
        return
    result = {
        "device": torch.cuda.get_device_name(),
        "copy_tb_per_s": round(bytes_per_us / 1e6, 3),
        "rows": rows,
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def print_row(row: dict[str, Any], shape: str) -> None:
    """One line: the shape, the common columns, the launches."""
    parts = ", ".join(f"{name} {us}" for name, us in row["launches"].items())
    print(
        f"{shape} {row['host_us']:7.1f} {row['eager_us']:8.1f} {row['us']:8.1f} "
        f"{row['spread_us']:6.1f} {row['moved_mb']:9.3f} {row['limit_us']:8.2f} "
        f"{row['ratio']:7.2f}  {parts}",
        flush=True,
    )


HEADER = "   host    eager    graph spread        MB    limit   ratio  us of each launch"
