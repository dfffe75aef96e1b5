"""Tiny random Hugging Face checkpoints: an architecture's arithmetic in a few thousand weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specreg.errors import ConfigError
from specreg.spelling import known_names

__all__ = ["TINY_MODELS", "TINY_VOCAB_SIZE", "save_tiny_model", "save_tiny_tokenizer"]

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = ("\n", *map(chr, range(32, 127)))

# One id more than the tokenizer has tokens: models have rows that no text reaches, and it is prime.
TINY_VOCAB_SIZE = len(_SPECIAL_TOKENS) + len(_CHARACTERS) + 1

_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
)

TINY_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"model_type": "llama"},
        "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
        "qwen2": {"model_type": "qwen2", "head_dim": None},
        "qwen3": {"model_type": "qwen3"},
        "mistral": {"model_type": "mistral", "sliding_window": 7},
        "gemma2": {
            "model_type": "gemma2",
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "query_pre_attn_scalar": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        "gemma3": {
            "model_type": "gemma3_text",
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 4,
        },
        "gemma4": {
            "model_type": "gemma4_text",
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": TINY_VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 0,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
        "gpt_oss": {
            "model_type": "gpt_oss",
            "sliding_window": 7,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v3": {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "head_dim": None,
            "q_lora_rank": 12,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        "granite": {"model_type": "granite", "logits_scaling": 1.7, "residual_multiplier": 0.5},
        "cohere": {"model_type": "cohere", "logit_scale": 0.3, "tie_word_embeddings": True},
    }
)


def save_tiny_model(
    kind: str,
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a random model and its tokenizer as a Hugging Face directory.

    No weight keeps a neutral value: biases are not 0 and norms not 1, so that code that forgets one
    gives other logits.

    Args:
        kind: a key of `TINY_MODELS`.
        directory: where to write; made if missing.
        seed: of the weights. The global generator is left as it was.
        dtype: of the saved weights.
        overrides: config keys that replace the kind's own; None drops a key.

    Returns:
        The directory.

    Raises:
        ConfigError: an unknown kind.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind not in TINY_MODELS:
        raise ConfigError(
            "there is no such tiny model",
            where="save_tiny_model(kind)",
            got=f"{kind!r}; {known_names(kind, TINY_MODELS)}",
            fix="name one of the known kinds",
        )
    fields = {**_COMMON, **TINY_MODELS[kind], **overrides}
    fields = {name: value for name, value in fields.items() if value is not None}
    config: Any = AutoConfig.for_model(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return Path(directory)


def save_tiny_tokenizer(directory: str | os.PathLike[str]) -> None:
    """Write a tokenizer with one token a printable ASCII character; it round-trips such text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *_CHARACTERS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(directory)
