"""How the engines of a conformance run are set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specreg.config import EngineConfig
from specreg.testing.observed import Twist
from specreg.testing.subject import Subject

__all__ = ["BLOCKS_PER_REQUEST", "MAX_MODEL_LEN", "Settings", "engine_config"]

MAX_MODEL_LEN = 64
BLOCK_SIZE = 8
BLOCKS_PER_REQUEST = MAX_MODEL_LEN // BLOCK_SIZE


@dataclass(frozen=True)
class Settings:
    """How an engine is set up.

    Attributes:
        tp: ranks.
        max_num_seqs: slots; the default of `Lab.slots` divides by no number of ranks above 1.
        sharding, layout, rejection: the config keys `draft_logits_sharding`,
            `draft_logits_layout` and `rejection_sample_method`.
        drafts: `draft_sample_method`; None takes what shows most of the speculator.
        is_baseline: without the speculator.
        chunk: tokens a step.
        num_kv_blocks: None is enough for every slot.
        twist: see `Twist`.
        watermarker: the config key `draft_watermarker`.
    """

    tp: int = 1
    max_num_seqs: int = 5
    sharding: str = "auto"
    layout: str = "auto"
    rejection: str = "standard"
    drafts: str | None = None
    is_baseline: bool = False
    chunk: int = 128
    num_kv_blocks: int | None = None
    twist: Twist = Twist.NONE
    watermarker: str | None = None


def engine_config(subject: Subject, settings: Settings, drafts: str) -> EngineConfig:
    """The configuration of a run."""
    config: dict[str, Any] = {
        "target": subject.target,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.chunk,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": settings.num_kv_blocks or BLOCKS_PER_REQUEST * settings.max_num_seqs,
        "tensor_parallel_size": settings.tp,
        "enable_batch_sharded_sampling": settings.tp > 1,
        "draft_logits_sharding": settings.sharding,
        "device": subject.device,
        "dtype": subject.dtype,
        "enforce_eager": True,  # What is observed waits for the device.
    }
    if not settings.is_baseline:
        config["draft_logits_layout"] = settings.layout
        config["draft_watermarker"] = settings.watermarker
        config["speculative"] = {
            **subject.speculative,
            "draft_sample_method": settings.drafts or drafts,
            "rejection_sample_method": settings.rejection,
        }
    return EngineConfig.parse(config)
