"""The decoder layers of MTP modules, as the config of their target describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specreg.config_reader import ConfigReader
from specreg.errors import CheckpointError
from specreg.nn.shape import DecoderShape
from specreg_mtp.conventions import Family
from specreg_mtp.layer_kinds import LayerKind

__all__ = ["layer_shapes"]


def layer_shapes(config: ConfigReader, family: Family, num_modules: int) -> list[DecoderShape]:
    """The layer of each module, a shape of one layer; an absent `intermediate_size` is 0.

    Raises:
        CheckpointError: a size is missing or wrong, or a layer is of a kind that is not offered.
    """
    known = _common(config, family.kind)
    if family.convention.name == "step":
        layers = [_step_layer(config, index) for index in range(num_modules)]
    else:
        _refuse_unequal_heads(config)
        layers = [{"sliding_windows": (_window(config),)}] * num_modules
    return [DecoderShape.read(config, num_layers=1, **known, **layer) for layer in layers]


def _common(config: ConfigReader, kind: LayerKind) -> dict[str, Any]:
    bias = kind.attention_bias is None or config.flag("attention_bias", kind.attention_bias)
    everywhere = config.flag("use_bias", False)
    head_norms = kind.has_head_norms
    if head_norms is None:
        head_norms = config.flag("use_qk_norm", False)
    return {
        "intermediate_size": config.integer("intermediate_size", 0, minimum=0),
        "attention_bias": bias or everywhere or config.flag("qkv_bias", False),
        "attention_output_bias": (bias and kind.has_output_bias) or everywhere,
        "mlp_bias": config.flag("mlp_bias", False) or everywhere,
        "has_head_norms": head_norms,
        "has_gated_attention": kind.has_gated_attention and config.flag("attn_output_gate", True),
        "has_zero_centred_norms": kind.has_zero_centred_norms,
        "eps": config.number("rms_norm_eps", None) or config.number("layernorm_epsilon", 1e-6),
    }


def _window(config: ConfigReader) -> int | None:
    """Keys that a module sees; None is all. Layers of several types are another matter.

    Where the target mixes types, its modules are of the full kind.
    """
    window: int | None = config.integer("sliding_window", None)
    model_type = config.text("model_type", "")
    is_off = model_type == "mimo" or model_type.startswith(("llama", "qwen"))
    is_used = config.flag("use_sliding_window", not is_off) and "layer_types" not in config
    return window if is_used else None


def _refuse_unequal_heads(config: ConfigReader) -> None:
    head_dim = config.get("head_dim")
    for key, usual in (("v_head_dim", head_dim), ("attention_value_scale", 1.0)):
        value = config.get(key)
        if value is not None and "kv_lora_rank" not in config and value != usual:
            raise _not_offered(config, key, value, f"absent, or {usual}")


def _step_layer(config: ConfigReader, module: int) -> dict[str, Any]:
    """Step writes one entry a layer, its modules' behind those of the target."""
    first = config.integer("num_hidden_layers")
    types = _entries(config, "layer_types", str) + _entries(config, "mtp_layer_types", str)
    kind = types[first + module] if first + module < len(types) else "full_attention"
    heads = {
        "num_heads": config.integer("num_attention_heads"),
        "num_kv_heads": config.integer("num_attention_groups"),
    }
    window = None
    if kind == "sliding_attention":
        window = config.integer("sliding_window")
        other = config.section("attention_other_setting")
        other.accept("attention_type", "head_dim", "true_head_dim")
        heads["num_heads"] = other.integer("num_attention_heads", heads["num_heads"])
        heads["num_kv_heads"] = other.integer("num_attention_groups", heads["num_kv_heads"])
    limits = _entries(config, "swiglu_limits_shared", object)
    if first + module < len(limits) and limits[first + module]:
        raise _not_offered(config, "swiglu_limits_shared", limits[first + module], "0 or null")
    if not all(_entries(config, "use_rope_layers", object)[first : first + module + 1] or [True]):
        raise _not_offered(config, "use_rope_layers", False, "true")
    return {
        **heads,
        "sliding_windows": (window,),
        "has_head_gates": config.flag("use_head_wise_attn_gate", False),
        "rope": _step_rope(config, first + module, kind),
    }


def _step_rope(config: ConfigReader, layer: int, kind: str) -> dict[str, Any]:
    by_type = config.get("rope_parameters")
    if isinstance(by_type, Mapping):
        return {"rope_parameters": by_type.get(kind, by_type)}
    theta, scaling = config.get("rope_theta", 10_000.0), config.get("rope_scaling")
    factors = _entries(config, "partial_rotary_factors", object)
    scaled = config.texts("yarn_only_types")
    rope = {"rope_theta": theta[min(layer, len(theta) - 1)] if isinstance(theta, list) else theta}
    if layer < len(factors):
        rope["partial_rotary_factor"] = factors[layer]
    if scaling is not None and (scaled is None or kind in scaled):
        rope["rope_scaling"] = scaling
    return rope | {"max_position_embeddings": config.integer("max_position_embeddings", 2048)}


def _entries(config: ConfigReader, key: str, kind: type) -> list[Any]:
    """A list with one entry a layer; empty where the key is absent."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or any(not isinstance(item, kind) for item in value):
        raise _not_offered(config, key, value, "a list of one entry a layer")
    return value


def _not_offered(config: ConfigReader, key: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(
        "an MTP module has a layer of a kind that is not offered",
        where=f"{config.where}, {key}",
        got=f"{value!r}; allowed: {allowed}",
        fix="use another speculator for this target",
    )
