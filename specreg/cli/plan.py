"""`specreg plan`: what a run would keep of draft logits on each rank, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specreg.config import EngineConfig
from specreg.errors import ConfigError
from specreg.known_models import KNOWN_MODELS
from specreg.memory import GIB, kv_bytes_per_token, kv_cache_gain_percent
from specreg.model_config import dtype_of, read_model_config, text_config_of
from specreg.plan import DraftLogitsPlan
from specreg.policy import resolve

__all__ = ["plan"]


def plan(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration file: YAML, TOML or JSON.")
    ] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="JSON, as `vllm serve --speculative-config` takes it.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    enable_batch_sharded_sampling: Annotated[
        bool | None, typer.Option(help="Each rank verifies the requests it owns.")
    ] = None,
    target_config: Annotated[
        str | None, typer.Option(help="The target's config.json, its directory, or a known name.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Overrides the target config's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Overrides the target config's.")] = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(help="KV cache of a rank, to tell the gain.")
    ] = None,
    draft_logits_sharding: Annotated[str | None, typer.Option(help="auto, require or off.")] = None,
    draft_logits_layout: Annotated[
        str | None, typer.Option(help="auto, dense, draft_vocab or top_k.")
    ] = None,
    draft_watermarker: Annotated[
        str | None, typer.Option(help="Name of an installed draft watermarker.")
    ] = None,
    rejection_sampler: Annotated[
        str | None, typer.Option(help="Name of an installed rejection sampler.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan the draft-logits cache of a run without loading anything."""
    if target_config is not None and read_model_config(target_config) is None:
        raise ConfigError(
            "the target config is not there",
            where="--target-config",
            got=f"{target_config!r}; allowed: a config.json, a directory that has one, or one of "
            f"{', '.join(KNOWN_MODELS)}",
            fix="correct the path, or pass --vocab-size and --dtype instead",
        )
    if kv_cache_gib is not None and not kv_cache_gib > 0:
        raise ConfigError(
            "a KV cache of this size cannot gain anything",
            where="--kv-cache-gib",
            got=f"{kv_cache_gib}; allowed: more than 0",
            fix="pass the GiB that a rank has for KV",
        )
    flags = {
        "speculative_config": speculative_config,
        "tensor_parallel_size": tensor_parallel_size,
        "max_num_seqs": max_num_seqs,
        "enable_batch_sharded_sampling": enable_batch_sharded_sampling,
        "target": target_config,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "draft_logits_sharding": draft_logits_sharding,
        "draft_logits_layout": draft_logits_layout,
        "draft_watermarker": draft_watermarker,
        "rejection_sampler": rejection_sampler,
    }
    engine = EngineConfig.parse(flags) if config is None else EngineConfig.load(config, flags)
    resolved = resolve(engine)
    gain_percent = None
    if kv_cache_gib is not None:
        gain_percent = kv_cache_gain_percent(resolved.freed_bytes_per_rank, kv_cache_gib * GIB)
    gain_tokens = _gain_tokens(engine, resolved)
    if as_json:
        answer: dict[str, Any] = {**resolved.to_dict(), "kv_cache_gain_percent": gain_percent}
        if gain_tokens is not None:
            answer["kv_cache_gain_tokens"] = gain_tokens
        print(json.dumps(answer, indent=2))
        return
    print(resolved.explain())
    if gain_percent is not None:
        print(f"KV cache of {kv_cache_gib:g} GiB a rank: +{gain_percent:.2f}%")
    if gain_tokens is not None:
        print(f"KV cache: +{gain_tokens} tokens (every rank holds all layers and KV heads)")


def _gain_tokens(config: EngineConfig, resolved: DraftLogitsPlan) -> int | None:
    """Tokens of the target whose KV fits into what sharding frees; None when that is unknown."""
    target = read_model_config(config.target)
    if target is None:
        return None
    dtype = dtype_of(target) if config.dtype == "auto" else config.dtype
    if dtype is None:
        return None
    token_bytes = kv_bytes_per_token(text_config_of(target), dtype)
    return None if token_bytes is None else resolved.freed_bytes_per_rank // token_bytes
