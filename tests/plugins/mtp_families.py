"""A tiny checkpoint of each family, and what its modules are like, written out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_harness import HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE
from mtp_reference import Facts
from safetensors.torch import load_file
from torch import Tensor

from specreg.testing import save_random_checkpoint

__all__ = ["FAMILIES", "SIZES", "TinyFamily"]

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 8, 48
SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
}
TOKEN_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
E_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class TinyFamily:
    """One family.

    Attributes:
        config: of the checkpoint, less the sizes.
        facts: what the reference needs; names hold `{}` for the number of the module.
        numbers: of the modules in the file.
        more: further tensors of each decoder layer.
        query_size: rows of `q_proj`.
        is_pre_norm: which states it asks for.
        is_whole: the sizes lie at the top of the config.
    """

    config: Mapping[str, Any]
    facts: Facts
    numbers: Sequence[int] = (0,)
    more: Mapping[str, tuple[int, ...]] | None = None
    query_size: int = HEADS * HEAD_DIM
    is_pre_norm: bool = False
    section: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        facts, found = self.facts, {}
        layer = {
            "self_attn.q_proj.weight": (self.query_size, HIDDEN_SIZE),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.o_proj.weight": (HIDDEN_SIZE, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (INNER, HIDDEN_SIZE),
            "mlp.up_proj.weight": (INNER, HIDDEN_SIZE),
            "mlp.down_proj.weight": (HIDDEN_SIZE, INNER),
            "input_layernorm.weight": (HIDDEN_SIZE,),
            f"{facts.post_norm}.weight": (HIDDEN_SIZE,),
            **(self.more or {}),
        }
        for number in self.numbers:
            found |= {f"{facts.layer.format(number)}.{n}": shape for n, shape in layer.items()}
            found[facts.projection.format(number) + ".weight"] = (HIDDEN_SIZE, 2 * HIDDEN_SIZE)
            for norm in (facts.embedding_norm, facts.hidden_norm, facts.final_norm):
                if norm is not None:
                    found[norm.format(number) + ".weight"] = (HIDDEN_SIZE,)
            if facts.head is not None:
                found[facts.head.format(number) + ".weight"] = (VOCAB_SIZE, HIDDEN_SIZE)
        return found

    def full_config(self) -> dict[str, Any]:
        """With the sizes in their place."""
        if self.section is not None:
            return {**self.config, self.section: {**SIZES, **self.config[self.section]}}
        return {**SIZES, **self.config}

    def save(self, directory: Path) -> dict[str, Tensor]:
        """Write it; returns the weights."""
        save_random_checkpoint(directory, self.full_config(), self.shapes())
        return load_file(directory / "model.safetensors")


def _named(layer: str, names: Sequence[str], **facts: Any) -> Facts:
    """Parts that lie beside the layer's own: embedding norm, hidden norm, projection, last norm."""
    e, u, projection, last = (f"{layer}.{name}" for name in names)
    return Facts(layer, projection, e, u, last, **facts)


_NORMED = {f"{name}.weight": (HEAD_DIM,) for name in HEAD_NORMS}
_BIASES = {
    "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    "self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    "self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
}
_LAYERS = range(NUM_LAYERS, NUM_LAYERS + 3)
_QWEN = Facts(
    "mtp.layers.{}",
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
)
_GATED = Facts(*(getattr(_QWEN, n) for n in list(Facts.__dataclass_fields__)[:5]), one_plus=True)

FAMILIES: Mapping[str, TinyFamily] = {
    "speculators of qwen2": TinyFamily(
        {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "transformer_layer_config": {"rope_parameters": {"rope_theta": 500.0}},
        },
        _named("mtp_layers.{}", TOKEN_NAMES, theta=500.0),
        more=_BIASES,
        section="transformer_layer_config",
    ),
    "qwen3_next": TinyFamily(
        {
            "model_type": "qwen3_next",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000.0,
            "layer_types": ["linear_attention", "full_attention"],
        },
        Facts(**{**vars(_GATED), "rotary_dim": 4, "theta": 1000.0}),
        more=_NORMED,
        query_size=2 * HEADS * HEAD_DIM,
    ),
    "qwen3_next without gates": TinyFamily(
        {"model_type": "qwen3_next", "attn_output_gate": False, "qkv_bias": True},
        _GATED,
        more=_NORMED | _BIASES,
    ),
    "a plain target": TinyFamily({"model_type": "llama"}, _QWEN),
    "mimo": TinyFamily(
        {"model_type": "mimo", "num_nextn_predict_layers": None},
        _named("model.mtp_layers.{}", TOKEN_NAMES, is_hidden_first=True, zeroes_first=True),
        more=_BIASES,
        is_pre_norm=True,
    ),
    "mimo_v2": TinyFamily(
        {"model_type": "mimo_v2_flash", "sliding_window": 4},
        _named(
            "model.mtp.layers.{}",
            ("enorm", "hnorm", "eh_proj", "final_layernorm"),
            post_norm="pre_mlp_layernorm",
            window=4,
        ),
    ),
    "deepseek": TinyFamily(
        {"model_type": "deepseek_v3", "num_nextn_predict_layers": 3},
        _named(
            "model.layers.{}", E_NAMES, zeroes_first=True, head="model.layers.{}.shared_head.head"
        ),
        numbers=_LAYERS,
    ),
    "glm": TinyFamily(
        {
            "model_type": "glm4_moe",
            "num_nextn_predict_layers": 3,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        _named("model.layers.{}", E_NAMES, feeds_stream=True, zeroes_first=True, rotary_dim=4),
        numbers=_LAYERS,
        more=_NORMED | _BIASES,
    ),
    "ernie": TinyFamily(
        {"model_type": "ernie4_5_moe", "num_nextn_predict_layers": 3},
        Facts(
            "model.mtp_block.{}",
            "model.mtp_linear_proj.{}",
            "model.mtp_emb_norm.{}",
            "model.mtp_hidden_norm.{}",
            None,
            feeds_stream=True,
            zeroes_first=True,
        ),
        numbers=range(3),
    ),
    "step": TinyFamily(
        {
            "model_type": "step3p5",
            "num_nextn_predict_layers": 3,
            "num_attention_groups": KV_HEADS,
            "num_key_value_heads": None,
            "use_head_wise_attn_gate": True,
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "sliding_window": 5,
            "attention_other_setting": {"num_attention_groups": KV_HEADS},
            "rope_theta": [1.0, 1.0, 300.0, 300.0, 300.0],
            "partial_rotary_factors": [1.0, 1.0, 0.5, 0.5, 0.5],
        },
        _named(
            "model.layers.{}",
            E_NAMES,
            feeds_stream=True,
            one_plus=True,
            head="model.layers.{}.shared_head.output",
            window=5,
            rotary_dim=4,
            theta=300.0,
        ),
        numbers=_LAYERS,
        more=_NORMED | {"self_attn.g_proj.weight": (HEADS, HIDDEN_SIZE)},
        is_pre_norm=True,
    ),
}
