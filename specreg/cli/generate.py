"""`specreg generate`: decode prompts with the embedded engine."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from specreg.cli.prompts import read_prompts
from specreg.config import EngineConfig
from specreg.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specreg.runtime.engine import GenerateOutputs
    from specreg.runtime.stats import RunStats

__all__ = ["generate"]

DEFAULT_PROMPT = "The capital of France is"


def generate(
    target: Annotated[
        str, typer.Option(help="Known name or directory of the target model.")
    ] = "smollm2-135m-instruct",
    speculative_config: Annotated[
        str | None, typer.Option(help="JSON, as `vllm serve --speculative-config` takes it.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks, a process each.")
    ] = 1,
    enable_batch_sharded_sampling: Annotated[
        bool, typer.Option(help="Each rank verifies the requests it owns.")
    ] = False,
    draft_logits_sharding: Annotated[
        str, typer.Option(help="auto, require or off (the replicated cache).")
    ] = "auto",
    draft_logits_layout: Annotated[
        str, typer.Option(help="auto, dense, draft_vocab or top_k.")
    ] = "auto",
    draft_watermarker: Annotated[
        str | None, typer.Option(help="Name of an installed draft watermarker.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 8,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens; the target's limit if not given.")
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 512,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    memory_budget_gib: Annotated[
        float, typer.Option(help="Memory of a rank for weights, caches and KV, on a CPU.")
    ] = 4.0,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a device's memory for the same, on a GPU.")
    ] = 0.9,
    prompt: Annotated[str | None, typer.Option(help="One prompt.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines file, a prompt a line.")] = None,
    prompt_key: Annotated[str, typer.Option(help="Field of a line that holds it.")] = "prompt",
    max_tokens: Annotated[int, typer.Option(help="Tokens to emit a prompt, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all tokens.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of every prompt's draws, with its index.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode prompts, speculatively when a speculative config is given."""
    if prompt is not None and prompts is not None:
        raise ConfigError(
            "the prompts are given twice",
            where="--prompt, --prompts",
            got="both; allowed: one of them",
            fix="drop one",
        )
    if prompts is not None:
        texts = read_prompts(prompts, prompt_key)
    else:
        texts = [DEFAULT_PROMPT if prompt is None else prompt]
    config = EngineConfig.parse(
        {
            "target": target,
            "speculative_config": speculative_config,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_batch_sharded_sampling": enable_batch_sharded_sampling,
            "draft_logits_sharding": draft_logits_sharding,
            "draft_logits_layout": draft_logits_layout,
            "draft_watermarker": draft_watermarker,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "dtype": dtype,
            "device": device,
            "memory_budget_gib": memory_budget_gib,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed,
        }
    )
    # The engine brings torch and transformers: not before the arguments have been understood.
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise MissingDependencyError(
            "the embedded engine cannot run",
            where="transformers",
            got=f"{error}; allowed: transformers >= 5.0",
            fix="pip install 'specreg[demo]'",
        ) from error
    from specreg.runtime.engine import Engine
    from specreg.sampling_params import SamplingParams

    disable_progress_bar()  # type: ignore[no-untyped-call]  # They would break into the bar here.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("specreg").setLevel(logging.INFO)  # One line a rank, on standard error.
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed + index,
        )
        for index in range(len(texts))
    ]
    with (
        _progress(len(texts)) as (loading, finished),
        Engine.from_config(config, progress=loading) as engine,
    ):
        outputs = engine.generate(texts, params, on_finish=finished)
        plan = engine.plan.to_dict() if engine.plan is not None else None
    if as_json:
        print(json.dumps(_as_json(outputs, plan), ensure_ascii=False))
    else:
        _print(outputs, plan)


@contextmanager
def _progress(num_prompts: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A moving bar with the stage of loading, then a bar over the prompts; on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        loading = progress.add_task("starting", total=None)
        prompts = progress.add_task("prompts", total=num_prompts, visible=False)

        def finish(_: int) -> None:
            progress.update(loading, visible=False)
            progress.update(prompts, visible=True, advance=1)

        yield lambda stage: progress.update(loading, description=stage), finish


def _stats_as_json(stats: RunStats) -> dict[str, Any]:
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
        "draft_logits_bytes_per_rank": stats.draft_logits_bytes_per_rank,
        "num_kv_blocks": stats.num_kv_blocks,
        "tokens_per_second": stats.tokens_per_second,
    }


def _as_json(outputs: GenerateOutputs, plan: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
            }
            for output in outputs
        ],
        "plan": plan,
        "stats": _stats_as_json(outputs.stats),
    }


def _print(outputs: GenerateOutputs, plan: dict[str, Any] | None) -> None:
    console, stats = Console(), outputs.stats
    for output in outputs:
        console.print(output.prompt, style="dim", end="", markup=False, highlight=False)
        console.print(output.text, markup=False, highlight=False)
        console.print()
    if plan is not None:
        console.print(
            f"draft logits: {plan['num_shards']} shard(s), {plan['rows_per_rank']} rows and "
            f"{stats.draft_logits_bytes_per_rank / 2**20:.1f} MiB a rank "
            f"(replicated {plan['replicated_bytes_per_rank'] / 2**20:.1f} MiB)",
            highlight=False,
        )
        console.print(
            f"acceptance length {stats.acceptance_length:.2f}, by position "
            + " ".join(f"{rate:.2f}" for rate in stats.acceptance_per_position),
            highlight=False,
        )
    console.print(
        f"{stats.num_emitted_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, "
        f"{stats.num_kv_blocks} KV blocks a rank",
        highlight=False,
    )
