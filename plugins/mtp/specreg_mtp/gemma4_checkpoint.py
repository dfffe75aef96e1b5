"""Reading an assistant from its checkpoint directory."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from specreg.checkpoint import Checkpoint
from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.model_config import read_model_config
from specreg.weights import Ignored, load_weights
from specreg_mtp.gemma4_config import AssistantConfig
from specreg_mtp.gemma4_modules import Assistant

__all__ = ["load_assistant", "read_config", "suppressed_tokens"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KEYS_AND_VALUES = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.(weight|bias)")


def read_config(checkpoint: Checkpoint) -> AssistantConfig:
    """The checkpoint's config; keys that nothing reads are logged. Raises `CheckpointError`."""
    reader = ConfigReader(checkpoint.config, str(checkpoint.directory / "config.json"))
    config = AssistantConfig.read(reader)
    reader.report()
    return config


def load_assistant(
    checkpoint: Checkpoint, config: AssistantConfig, *, dtype: torch.dtype, device: torch.device
) -> Assistant:
    """The assistant of a checkpoint.

    Raises:
        CheckpointError: tensors and config do not fit.
    """
    assistant = Assistant(config, device)

    def rename(name: str) -> str | Ignored:
        if name == EMBEDDING:
            return HEAD if config.is_tied else Ignored("the target embeds tokens")
        if name == HEAD and config.is_tied:
            return Ignored("the head is tied to the embedding")
        if _KEYS_AND_VALUES.fullmatch(name):
            return Ignored("keys and values are the target's")
        return name

    def file_name(name: str) -> str:
        return EMBEDDING if name == HEAD and config.is_tied else name

    load_weights(assistant, checkpoint, rename, file_name=file_name, dtype=dtype, device=device)
    if config.centroids is not None:
        assistant.masked_embedding.check()
    return assistant


def suppressed_tokens(
    checkpoint: Checkpoint, vocab_size: int, device: torch.device
) -> Tensor | None:
    """Ids `[n]` that `suppress_tokens` of the `generation_config.json` forbids; None without any.

    Raises:
        CheckpointError: the file cannot be read, or names tokens that do not exist.
    """
    file = checkpoint.directory / "generation_config.json"
    config = (read_model_config(str(file)) or {}) if file.is_file() else {}
    ids = ConfigReader(config, str(file)).integers("suppress_tokens") or ()
    if any(token >= vocab_size for token in ids):
        raise CheckpointError(
            "a checkpoint suppresses tokens that it does not have",
            where=f"{file}, key 'suppress_tokens'",
            got=f"{max(ids)}; allowed: 0 .. {vocab_size - 1}",
            fix="use the generation_config.json that belongs to the weights",
        )
    return torch.tensor(ids, dtype=torch.int64, device=device) if ids else None
