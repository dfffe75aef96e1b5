"""Runs every benchmark on this device and writes one table.

Each script runs in a process of its own; it times a case only after the op matched its torch twin
there, and one that fails is named in the table and in the exit status. The results,
`benchmarks/results/<device>.md` and `.json`, say device, versions, shape, dtype, median, spread,
bytes, limit, ratio and launches. Benchmarks that are not named keep the results that they have
there; where those are of other versions, only all can be run.

    python benchmarks/run.py [NAME ...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton

FOLDER = Path(__file__).parent
BENCHMARKS = (
    "draft_sample",
    "gumbel_sample",
    "cache_candidates",
    "rejection_sample",
    "markov_sample",
    "paged_attention",
)
# Columns that every benchmark has: name in a row, head of a table. Whatever else a row holds is its
# shape. The table shows the first ones for each number of shards, the others once.
SHARDED = {"us": "us", "spread_us": "spread", "limit_us": "limit", "ratio": "ratio"}
COMPARED = {"loop_us": "loop"}  # shown with those of a benchmark that has them
SHARED = {"host_us": "host", "num_launches": "launches"}
DETAIL = ("eager_us", "moved_mb", "launches", "acceptance_length")  # in the JSON alone


def environment() -> dict[str, str]:
    """Device and versions."""
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda or torch.version.hip),
        "python": platform.python_version(),
    }


def driver_version() -> str:
    """What `nvidia-smi` says, where there is one."""
    if (command := shutil.which("nvidia-smi")) is None:
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0] or "unknown"


def run_benchmark(name: str) -> dict[str, Any]:
    """What a script reports, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
        start = time.monotonic()
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        seconds = round(time.monotonic() - start, 1)
        if done.returncode == 0:
            return json.loads(path.read_text()) | {"seconds": seconds}
    error = done.stderr.strip().splitlines() or ["no message"]
    return {"error": error[-1], "rows": [], "seconds": seconds}


def table(name: str, result: dict[str, Any]) -> str:
    """One benchmark in Markdown."""
    lines = [f"## {name}", ""]
    if "error" in result:
        return "\n".join([*lines, f"failed: {result['error']}", ""])
    rows = result["rows"]
    sharded = SHARDED | {key: head for key, head in COMPARED.items() if key in rows[0]}
    hidden = {*sharded, *SHARED, *DETAIL, "num_shards"}
    shape = [key for key in rows[0] if key not in hidden]
    by_shape: dict[tuple[Any, ...], dict[int | None, dict[str, Any]]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row[key] for key in shape), {})[row.get("num_shards")] = row
    shards = sorted({row.get("num_shards") for row in rows}, key=str)
    heads = [key.removeprefix("num_").replace("_", " ") for key in shape]
    for number in shards:
        behind = {None: "", 1: ", 1 shard"}.get(number, f", {number} shards")
        heads += [head + behind for head in sharded.values()]
    lines += [
        f"A copy moves {result['copy_tb_per_s']:.2f} TB/s.",
        "",
        f"| {' | '.join([*heads, *SHARED.values()])} |",
        f"| {' | '.join('---' for _ in (*heads, *SHARED))} |",
    ]
    for values, of_shape in by_shape.items():
        cells = [*values, *(of_shape.get(n, {}).get(key, "") for n in shards for key in sharded)]
        cells += [max(row[key] for row in of_shape.values()) for key in SHARED]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def earlier_results(path: Path, facts: dict[str, str]) -> dict[str, Any] | None:
    """What `path` holds of each benchmark; None if it was measured where `facts` do not hold."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    results = earlier.pop("results")
    return results if earlier == facts else None


def page(facts: dict[str, str], results: dict[str, Any]) -> str:
    """All results in Markdown."""
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "device")
    lines = [
        f"# {facts['device']}",
        "",
        f"{versions}. Times in microseconds: `us` is the median of replays from a CUDA graph, "
        "`spread` what lies between its first and last decile, `host` what the host needs for a "
        "call. `limit` is the bytes that must move, over the bandwidth of a copy; `ratio` is `us` "
        "over it. Where a cache may be shared, columns say among how many shards. The JSON beside "
        "this page also holds bytes, each launch alone, and calls launched one by one.",
        "",
        *(table(name, result) for name, result in results.items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--output", metavar="FOLDER", default=FOLDER / "results", type=Path)
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(BENCHMARKS)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device")
    facts = environment()
    path = options.output / re.sub(r"\W+", "-", facts["device"].lower())
    earlier = earlier_results(path.with_suffix(".json"), facts)
    if options.names and earlier is None:
        parser.error(f"{path}.json is of other versions: run all benchmarks, or name an --output")
    timed = {name: run_benchmark(name) for name in options.names or BENCHMARKS}
    options.output.mkdir(parents=True, exist_ok=True)
    known = (earlier or {}) | timed
    results = {name: known[name] for name in BENCHMARKS if name in known}
    path.with_suffix(".md").write_text(page(facts, results))
    path.with_suffix(".json").write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    print(f"written: {path}.md and .json")
    failed = [name for name, result in timed.items() if "error" in result]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
