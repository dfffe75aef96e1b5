"""Targets with random weights, of any size, and drafters that are sometimes right about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Standard deviations. Embeddings outweigh what single layers add, so the first layers of the model
# resemble all of it; the head makes logits that are neither flat nor one-hot.
EMBEDDING_SPREAD = 2.0
LAYER_SPREAD = 0.02
LOGITS_SPREAD = 2.0


def save_random_target(directory: Path, seed: int = 0, **config: Any) -> Path:
    """Write a random Hugging Face decoder in bf16, without a tokenizer; returns the directory.

    Args:
        directory: made if missing.
        seed: of the weights.
        config: of the model, `model_type` among it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    made = AutoConfig.for_model(**config, initializer_range=LAYER_SPREAD, use_cache=False)
    with device:
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, EMBEDDING_SPREAD)
        spread = LOGITS_SPREAD * made.hidden_size**-0.5
        model.get_output_embeddings().weight.normal_(0, spread)
    model.save_pretrained(directory)
    if device.type == "cuda":
        del model
        torch.cuda.empty_cache()  # Others measure memory here.
    return directory


def save_first_layers(target: Path, directory: Path, num_layers: int) -> Path:
    """Write the first layers of a target with its embeddings, norm and head: a cheap drafter."""
    weights = load_file(target / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if _layer(name) < num_layers}
    config = json.loads((target / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    directory.mkdir(parents=True)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _layer(name: str) -> int:
    """Index of the layer that a tensor belongs to; -1 for all others."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else -1
