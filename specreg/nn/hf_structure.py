"""Where the decoder, its layers and its limits are inside a Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from specreg.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DecoderStructure", "describe"]

_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their frequencies follow the longest sequence of the batch once it exceeds the original length.
_BATCH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class DecoderStructure:
    """The parts of a model that packed decoding needs.

    Attributes:
        decoder: from token ids to the states that the head reads.
        layers: its decoder layers.
        layer_names: their qualified names.
        layer_of: every module inside a layer -> the layer's index.
        max_model_len: longest request whose positions the model encodes the same in any company.
    """

    decoder: nn.Module
    layers: tuple[nn.Module, ...]
    layer_names: tuple[str, ...]
    layer_of: Mapping[nn.Module, int]
    max_model_len: int | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderStructure:
        """Find the parts; refuse layers that keep a state other than keys and values.

        Raises:
            TargetError: naming the layer or module.
        """
        config = model.config.get_text_config()
        names = {module: name for name, module in model.named_modules()}
        for decoder in (cast(Any, model).get_decoder(), model.base_model):
            layers = _find_layers(decoder, config.num_hidden_layers)
            if layers is not None:
                break
        else:
            raise TargetError(
                "the decoder layers cannot be found",
                where=f"{type(decoder).__name__} ({names.get(decoder, '')})",
                got=f"children {', '.join(name for name, _ in decoder.named_children())}; "
                f"allowed: a ModuleList of {config.num_hidden_layers} layers",
                fix="use a model whose layers form one list",
            )
        layer_names = tuple(names[layer] for layer in layers)
        structure = cls(
            decoder=decoder,
            layers=layers,
            layer_names=layer_names,
            layer_of={module: i for i, layer in enumerate(layers) for module in layer.modules()},
            max_model_len=_max_model_len(config),
        )
        structure._refuse_other_state(getattr(config, "layer_types", None) or (), names)
        return structure

    def _refuse_other_state(
        self, layer_types: tuple[str, ...] | list[str], names: Mapping[nn.Module, str]
    ) -> None:
        for layer, name, kind in zip(self.layers, self.layer_names, layer_types, strict=False):
            if kind not in _KNOWN_LAYER_TYPES:
                raise _other_state(name, layer, f"layer type {kind!r}")
        for module, index in self.layer_of.items():
            if isinstance(module, nn.Conv1d):
                raise _other_state(
                    names[module], self.layers[index], "a convolution over the sequence"
                )


def describe(layer: nn.Module) -> str:
    """A layer's class and those of its children, for an error message."""
    children = ", ".join(
        f"{name}: {type(child).__name__}" for name, child in layer.named_children()
    )
    return f"{type(layer).__name__}({children})"


def _other_state(name: str, layer: nn.Module, what: str) -> TargetError:
    return TargetError(
        "a layer keeps a state that is not keys and values",
        where=name,
        got=f"{what} in {describe(layer)}; allowed: full or sliding-window attention",
        fix="use a decoder whose layers all attend: rejected tokens cannot be taken back from a "
        "recurrent or convolution state",
    )


def _find_layers(decoder: nn.Module, num_layers: int) -> tuple[nn.Module, ...] | None:
    """The child list of `num_layers` modules with the most parameters."""
    lists = [
        tuple(child)
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    return max(lists, key=_num_parameters, default=None)


def _num_parameters(modules: tuple[nn.Module, ...]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _max_model_len(config: Any) -> int | None:
    limits = [
        rope["original_max_position_embeddings"]
        for rope in _ropes(getattr(config, "rope_parameters", None))
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPES
        and "original_max_position_embeddings" in rope
    ]
    longest = getattr(config, "max_position_embeddings", None)
    return min([*limits, *([longest] if longest else [])], default=None)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary settings, whether one for all layers or one a layer type."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        else:
            for value in parameters.values():
                yield from _ropes(value)
