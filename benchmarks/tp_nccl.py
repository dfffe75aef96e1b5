"""Tensor parallelism: what sharded sampling, and a sharded draft-logits cache, cost and free.

One process a GPU (or, with `--device cpu`, gloo processes of one thread). Three arms run the same
requests: base (every rank verifies everything), replicated (owners verify, every rank keeps all
draft logits) and sharded (each keeps those of its own requests). Each arm runs graphed and eagerly.
Refused, with exit status 1: other tokens in one of the last two arms, or in an eager run; another
number of collectives; bytes that the cache frees other than planned, beyond an allocator block.

    python benchmarks/tp_nccl.py [--num-ranks N] [--method NAME] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from random_models import save_first_layers, save_random_target
from run import environment
from tp_rank import PARTS, Workload, run_rank

FOLDER = Path(__file__).parent
ALLOCATOR_BLOCK = 2**21
ARMS = {
    "base": {},
    "replicated": {"enable_batch_sharded_sampling": True, "draft_logits_sharding": "off"},
    "sharded": {"enable_batch_sharded_sampling": True, "draft_logits_sharding": "require"},
}
SMOLLM2 = "smollm2-135m-instruct"
MIB = 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--num-ranks", type=int, help="default: one a GPU, or 2")
    add("--method", default="draft_model", help="speculator, as `specreg list` prints it")
    add("--model-type", default="qwen3", help="llama, qwen3 or a like one")
    add("--vocab-size", type=int, default=248_320)
    add("--hidden-size", type=int, default=1024)
    add("--layers", type=int, default=16)
    add("--draft-layers", type=int, default=4, help="of the target, that `draft_model` runs")
    add("--requests", type=int, default=256, help="that run at once, as all of them do")
    add("--speculative-tokens", type=int, default=7)
    add("--prompt-length", type=int, default=32)
    add("--max-tokens", type=int, default=64)
    add("--temperature", type=float, default=0.8)
    add("--graph-sizes", type=int, nargs="*", help="default: the engine's")
    add("--commit", help="of this tree, where git cannot tell")
    add("--output", metavar="FOLDER", default=FOLDER / "results", type=Path)
    options = parser.parse_args()
    if options.num_ranks is None:
        options.num_ranks = max(2, torch.cuda.device_count())
    return options


def commit() -> str:
    """Of the tree, where git is there to tell."""
    command = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def make_random_models(options: argparse.Namespace, folder: Path) -> tuple[str, dict[str, Any]]:
    """A target and the speculative configuration of a drafter for it."""
    num_heads = max(2, options.hidden_size // 64)
    target = save_random_target(
        folder / "target",
        model_type=options.model_type,
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=128 if options.hidden_size >= 1024 else 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    if options.method == "draft_model":
        draft = save_first_layers(target, folder / "draft", options.draft_layers)
        return str(target), {"method": "draft_model", "model": str(draft)}
    from specreg.testing import save_random_drafter

    return str(target), save_random_drafter(options.method, folder / "draft", str(target))


def smollm2() -> tuple[str, dict[str, Any]] | None:
    """The real model as its own drafter, if its weights are here."""
    from specreg.runtime.models import default_cache_dir

    if not any((default_cache_dir() / SMOLLM2).glob("fp32-*")):
        return None
    return SMOLLM2, {"method": "draft_model", "model": SMOLLM2}


def run_case(
    options: argparse.Namespace, target: str, speculative: dict[str, Any]
) -> list[dict[str, Any]]:
    """What every rank measured, by arm."""
    longest = options.prompt_length + options.max_tokens + options.speculative_tokens + 1
    common = {
        "target": target,
        "dtype": "bfloat16",
        "device": options.device,
        "tensor_parallel_size": options.num_ranks,
        "max_num_seqs": options.requests,
        "max_model_len": longest,
        "max_num_batched_tokens": 4096,
        "num_kv_blocks": options.requests * -(-longest // 16),
        "cuda_graph_sizes": options.graph_sizes,
        "speculative": {
            **speculative,
            "num_speculative_tokens": options.speculative_tokens,
            "draft_sample_method": "probabilistic",
        },
    }
    arms = {name: {**common, **arm} for name, arm in ARMS.items()}
    shape = options.prompt_length, options.temperature
    # Slots go to owners in turn: those of the last owner end first, and it idles.
    ranks = options.num_ranks
    lengths = tuple(4 if i % ranks == ranks - 1 else 40 for i in range(2 * ranks + 1))
    uneven = tuple(min(length, options.max_tokens) for length in lengths[: options.requests])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool,
    ):
        rank_arguments = (
            str(Path(folder, "store")),
            arms,
            {"memory_budget_gib": 4.0, "gpu_memory_utilization": 0.9},
            Workload((options.max_tokens,) * options.requests, *shape),
            Workload(uneven, *shape),
        )
        futures = [pool.submit(run_rank, rank, *rank_arguments) for rank in range(ranks)]
        return [future.result() for future in futures]


def check(ranks: list[dict[str, Any]], is_gpu: bool) -> dict[str, bool]:
    """What must hold, by sentence."""
    first = ranks[0]
    replicated, sharded = first["replicated"], first["sharded"]
    holds = {
        "the last two arms emit the same tokens": all(
            replicated[key] == sharded[key] for key in ("tokens", "uneven_tokens")
        ),
        "graphed runs emit the tokens of eager ones": all(
            first[name][key] == first[f"{name}, eager"][key]
            for name in ARMS
            for key in ("tokens", "uneven_tokens")
        ),
        "their collectives are equal in number and bytes": all(
            replicated[key] == sharded[key] for key in ("collectives", "collective_bytes")
        ),
        "replays count the collectives of eager runs": all(
            first[name][key] == first[f"{name}, eager"][key]
            for name in ARMS
            for key in ("collectives", "collective_bytes")
        ),
    }
    block_bytes = replicated["block_bytes"]
    planned = (replicated["cache_bytes"] - sharded["cache_bytes"]) // block_bytes
    gained = sharded["num_kv_blocks"] - replicated["num_kv_blocks"]
    holds["what the cache frees becomes KV blocks"] = planned <= gained <= planned + 1
    if is_gpu:
        holds["allocated bytes fall by what the plan frees, on every rank"] = all(
            _frees(rank, "allocated_bytes", eager) for rank in ranks for eager in ("", ", eager")
        )
        holds["peak bytes fall by what the plan frees, on every rank"] = all(
            _frees(rank, "peak_bytes", eager) for rank in ranks for eager in ("", ", eager")
        )
    return holds


def _frees(rank: dict[str, Any], kind: str, eager: str) -> bool:
    replicated, sharded = rank[f"replicated{eager}"], rank[f"sharded{eager}"]
    planned = replicated["cache_bytes"] - sharded["cache_bytes"]
    return abs(replicated[kind] - sharded[kind] - planned) <= ALLOCATOR_BLOCK


def table(ranks: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: bytes by rank, times over the ranks, collectives of rank 0."""
    heads = ["arm", "cache MiB", "allocated MiB a rank", "peak MiB a rank"]
    heads += ["reserved MiB a rank", "KV blocks"]
    heads += ["tokens/s", "acceptance", "step ms", *(f"{part} ms" for part in PARTS)]
    heads += ["collectives a step", "MB a step"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for arm, result in ranks[0].items():
        each = [rank[arm] for rank in ranks]
        steps = result["num_steps"]
        kinds = sorted(result["collectives"])
        times = {part: [rank["ms"][part] or 0.0 for rank in each] for part in ("step", *PARTS)}
        # The rank that comes last does not wait: its time is that of the exchange itself.
        times["logits exchange"] = [min(times["logits exchange"])]
        cells = [
            arm,
            f"{result['cache_bytes'] / MIB:.1f}",
            ", ".join(f"{rank['allocated_bytes'] / MIB:.1f}" for rank in each),
            ", ".join(f"{rank['peak_bytes'] / MIB:.1f}" for rank in each),
            ", ".join(f"{rank['reserved_bytes'] / MIB:.0f}" for rank in each),
            str(result.get("num_kv_blocks", "")),
            f"{result['tokens_per_second']:.0f}",
            f"{result['acceptance_length']:.2f}",
            *(f"{max(ms):.2f}" for ms in times.values()),
            ", ".join(f"{result['collectives'][kind] / steps:.2f} {kind}" for kind in kinds),
            ", ".join(f"{result['collective_bytes'][kind] / steps / 1e6:.3f}" for kind in kinds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def earlier_cases(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Those of the same tree on the same machine, which this run adds to."""
    if not path.is_file():
        return {}
    earlier = json.loads(path.read_text())
    cases = earlier.pop("cases")
    return cases if earlier == facts else {}


def page(facts: dict[str, Any], cases: dict[str, dict[str, Any]]) -> str:
    """All cases in Markdown."""
    versions = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "device")
    lines = [f"# {facts['device']}, {facts['num_ranks']} ranks", "", f"{versions}.", ""]
    lines += [
        "Bytes are those of the caching allocator of each rank, on top of what was there before, "
        "with a KV pool of fixed size; `KV blocks` is a pool that takes what the budget leaves. "
        "Graphs keep memory of their own, which shows as reserved. Times are medians over steps in "
        "which every request verifies drafts, of the slowest rank; those of the exchange are of "
        "the fastest one, which does not wait for another. `verification` holds the target's head "
        "and the rejection sampler, without the exchange. The target's forward is the same in all "
        "arms and is launched eagerly from Python: where it differs, the host did. Bytes of "
        "collectives are those of their results on rank 0.",
        "",
    ]
    for name, case in cases.items():
        lines += [f"## {name}", "", case["shape"], "", *table(case["ranks"]), ""]
        lines += [f"- {'holds' if ok else 'FAILS'}: {what}" for what, ok in case["checks"].items()]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = parse()
    is_gpu = options.device == "cuda"
    facts = {
        **(environment() if is_gpu else {"device": "cpu", "torch": torch.__version__}),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else "none",
        "commit": options.commit or commit(),
        "num_ranks": options.num_ranks,
    }
    label = re.sub(r"\W+", "-", facts["device"].lower())
    path = options.output / f"{label}-x{options.num_ranks}"
    cases = earlier_cases(path.with_suffix(".json"), facts)
    with tempfile.TemporaryDirectory() as folder:
        random = f"random {options.model_type}, {options.method}"
        models = {random: make_random_models(options, Path(folder))}
        if (real := smollm2()) is not None and options.method == "draft_model":
            models[SMOLLM2] = real
        for name, (target, speculative) in models.items():
            started = time.perf_counter()
            ranks = run_case(options, target, speculative)
            shape = (
                f"{options.requests} requests of {options.prompt_length} + {options.max_tokens} "
                f"tokens at temperature {options.temperature}, "
                f"{options.speculative_tokens} drafts of `{options.method}`"
            )
            if name != SMOLLM2:
                shape += (
                    f"; vocabulary {options.vocab_size:,}, hidden size {options.hidden_size}, "
                    f"{options.layers} layers, bf16"
                )
            checks = check(ranks, is_gpu)
            print("\n".join(table(ranks)), flush=True)
            for what, ok in checks.items():
                print(f"{'holds' if ok else 'FAILS'}: {what}", flush=True)
            for rank in ranks:
                for result in rank.values():
                    result.pop("tokens", None), result.pop("uneven_tokens", None)
            seconds = round(time.perf_counter() - started, 1)
            cases[name] = {"shape": shape, "seconds": seconds, "checks": checks, "ranks": ranks}
    options.output.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(page(facts, cases))
    path.with_suffix(".json").write_text(json.dumps(facts | {"cases": cases}, indent=1) + "\n")
    print(f"written: {path}.md and .json")
    failed = [what for case in cases.values() for what, ok in case["checks"].items() if not ok]
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
