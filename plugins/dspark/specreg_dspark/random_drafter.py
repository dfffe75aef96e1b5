"""Randomly initialised DSpark drafters for a target of any size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from specreg_dflash.random_drafter import backbone_shapes, hf_config

from specreg.testing import save_random_checkpoint

__all__ = ["random_dspark"]

RANK = 8


def random_dspark(
    directory: Path,
    target_config: Mapping[str, Any],
    *,
    draft_vocab_size: int | None = None,
    sample_from_anchor: bool = True,
    markov_head: str = "vanilla",
) -> dict[str, Any]:
    """Write a DSpark drafter of two layers, one of each kind, with a confidence head.

    Args:
        directory: an empty one.
        target_config: the target's `config.json`.
        draft_vocab_size: columns of a reduced head of its own; None shares the target's.
        sample_from_anchor: whether the anchor's row gives the first draft.
        markov_head: `vanilla`, `gated` or `rnn`.

    Returns:
        The speculative configuration that selects it.
    """
    config = hf_config(target_config, "Qwen3DSparkModel")
    shapes, hidden = backbone_shapes(config), config["hidden_size"]
    vocab_size = config["vocab_size"]
    config |= config.pop("dflash_config")
    config |= {
        "sample_from_anchor": sample_from_anchor,
        "markov_rank": RANK,
        "markov_head_type": markov_head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    shapes |= {
        "markov_head.markov_w1.weight": (vocab_size, RANK),
        "markov_head.markov_w2.weight": (draft_vocab_size or vocab_size, RANK),
        "confidence_head.proj.weight": (1, hidden + RANK),
        "confidence_head.proj.bias": (1,),
    }
    linears = {"gated": ("gate_proj", RANK, hidden + RANK)}
    linears["rnn"] = ("joint_proj", 3 * RANK, 2 * RANK + hidden)
    if markov_head in linears:
        name, *shape = linears[markov_head]
        shapes[f"markov_head.{name}.weight"] = tuple(shape)
        shapes[f"markov_head.{name}.bias"] = (shape[0],)
    integers = {}
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
        shapes["lm_head.weight"] = (draft_vocab_size, hidden)
        spread = torch.linspace(0, vocab_size - 1, draft_vocab_size).long()
        integers["d2t"] = spread - torch.arange(draft_vocab_size)
    save_random_checkpoint(directory, config, shapes, integers=integers)
    return {"method": "dspark", "model": str(directory)}
