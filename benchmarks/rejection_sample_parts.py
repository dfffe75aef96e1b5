"""Where does the time of verification go, and how large should its programs be?

Times each launch by itself, ten times in a CUDA graph, on what the launches before it left: first
with the constants of `specreg.kernels.rejection_sample.prepare`, then over other sizes of program.

    python benchmarks/rejection_sample_parts.py [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from rejection_sample import (
    BF16,
    FP32,
    TOP_K,
    Case,
    copy_bytes_per_us,
    graph_of,
    make_batch,
    median_us,
)

from specreg.kernels.rejection_sample import kernel, prepare
from specreg.kernels.rejection_sample.block import kernel as block
from specreg.kernels.rejection_sample.blocks.kernel import launch_target_blocks
from specreg.kernels.rejection_sample.prepare import Part
from specreg.kernels.rejection_sample.rows.kernel import launch_judge

Launcher = Callable[[Part], None]

LAUNCHERS: dict[str, list[Launcher]] = {
    "standard": [
        launch_target_blocks,
        launch_judge,
        kernel.launch_residual_blocks,
        kernel.launch_draw,
    ],
    "block": [
        launch_target_blocks,
        launch_judge,
        block.launch_block_residuals,
        block.launch_block_draw,
    ],
    "block, candidates": [
        launch_target_blocks,
        launch_judge,
        block.launch_candidates_residual,
        block.launch_candidates_draw,
    ],
}
CASES = [
    ("standard", Case(64, 7, 248_320, FP32)),
    ("standard", Case(64, 7, 248_320, BF16)),
    ("standard", Case(16, 7, 248_320, BF16)),
    ("standard", Case(1, 7, 151_936, BF16)),
    ("standard", Case(64, 7, 248_320, BF16, layout=TOP_K)),
    ("block", Case(64, 7, 248_320, BF16, "block")),
    ("block, candidates", Case(64, 7, 248_320, BF16, "block", TOP_K)),
]
REPEATS = 10

# Launcher, the constants of its programs, and the sizes to try of each.
SWEEPS: list[tuple[Launcher, tuple[str, ...], list[tuple[int, ...]]]] = [
    (
        launch_target_blocks,
        ("BLOCKS_PER_PROGRAM", "NUM_WARPS"),
        [(2, 4, 8, 16), (1, 2, 4, 8)],
    ),
    (
        kernel.launch_residual_blocks,
        ("RESIDUAL_BLOCKS_PER_PROGRAM", "RESIDUAL_NUM_WARPS"),
        [(2, 4, 8), (1, 2, 4)],
    ),
    (launch_judge, ("JUDGE_NUM_WARPS",), [(1, 2, 4, 8)]),
    (kernel.launch_draw, ("DRAW_NUM_WARPS",), [(1, 2, 4, 8)]),
]


def part_of(case: Case, launchers: list[Launcher]) -> Part:
    """The arguments of a case, whose requests fit into one part; launched once."""
    batch = make_batch(case)
    parts: list[Part] = []
    num_residuals = case.num_drafts if block.launch_block_residuals in launchers else 1
    prepare.in_parts(batch, parts.append, num_residuals=num_residuals)
    (part,) = parts
    for launch in launchers:
        launch(part)
    return part


def launch_us(launch: Launcher, part: Part) -> float:
    """Microseconds of one launch among equal ones in a graph."""
    launch(part)

    def repeated() -> None:
        for _ in range(REPEATS):
            launch(part)

    return median_us(graph_of(repeated).replay, 20) / REPEATS


def print_parts() -> None:
    print("us of each launch")
    for method, case in CASES:
        part = part_of(case, LAUNCHERS[method])
        times = [(launch.__name__, launch_us(launch, part)) for launch in LAUNCHERS[method]]
        detail = ", ".join(f"{name.removeprefix('launch_')} {us:.1f}" for name, us in times)
        print(
            f"{method}, {case.layout.value}, {case.num_reqs} requests, K {case.num_drafts}, "
            f"{case.vocab_size}, {str(case.dtype).removeprefix('torch.')}: {detail}; "
            f"together {sum(us for _, us in times):.1f}",
            flush=True,
        )
        torch.cuda.empty_cache()


def sweep(case: Case) -> None:
    part = part_of(case, LAUNCHERS["standard"])
    for launch, names, sizes in SWEEPS:
        print(f"{launch.__name__}, {case}: us by {' x '.join(names)}")
        before = {name: getattr(prepare, name) for name in names}
        times = {}
        for values in itertools.product(*sizes):
            for name, value in zip(names, values, strict=True):
                setattr(prepare, name, value)
            try:
                times[values] = launch_us(launch, part)
            except Exception as error:  # a size that the device cannot launch
                print(f"  {values}: {type(error).__name__}")
        for name, value in before.items():
            setattr(prepare, name, value)
        for values, us in sorted(times.items(), key=lambda item: item[1]):
            is_used = values == tuple(before.values())
            print(f"  {values}: {us:.1f}{' (used)' if is_used else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other sizes of program")
    options = parser.parse_args()
    bandwidth = copy_bytes_per_us()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e6:.2f} TB/s")
    print_parts()
    if options.sweep:
        for case in (Case(64, 7, 248_320, BF16), Case(64, 7, 248_320, FP32)):
            sweep(case)
            torch.cuda.empty_cache()
        sweep(Case(1, 7, 151_936, BF16))


if __name__ == "__main__":
    main()
