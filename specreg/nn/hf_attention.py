"""The attention function that Hugging Face models call, reading and writing a `KVView`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specreg.speculator import KVRows, KVView

__all__ = ["ATTENTION", "PROBE_ATTENTION", "AttentionCall", "DecoderStep", "register_attention"]

# The first has no mask function, so models build no mask (and do not look for packed sequences,
# which synchronises a GPU). The second has one that hands the mask's rule through to the layer.
ATTENTION = "specreg"
PROBE_ATTENTION = "specreg_probe"


@dataclass
class AttentionCall:
    """What one layer asked of the attention function, noted while a model is probed."""

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None
    mask: Any
    unknown: tuple[str, ...]


@dataclass
class DecoderStep:
    """One forward's addresses.

    They reach the attention layers through a context variable: not every model hands unknown
    keyword arguments down to them.

    Attributes:
        rows: addresses of the packed tokens.
        kv: where keys and values live.
        layers: attention module -> layer index of `kv`; a module that is not in it is only noted.
        calls: filled while probing; None otherwise.
    """

    rows: KVRows
    kv: KVView
    layers: Mapping[nn.Module, int]
    calls: list[AttentionCall] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attention layers called inside read and write this step's keys and values."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[DecoderStep] = ContextVar("specreg_decoder_step")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Store the packed tokens' keys and values, then attend over their requests' own.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key, value: `[1, num_kv_heads, num_tokens, head_dim]`; heads of values may be narrower.
        attention_mask: not used; visibility follows from the addresses.
        options: whatever else a model passes; looked at only while probing.

    Returns:
        `[1, num_tokens, num_heads, value_head_dim]` and no weights.
    """
    step = _current.get()
    if step.calls is not None:
        step.calls.append(
            AttentionCall(
                module=module,
                num_kv_heads=key.shape[1],
                head_dim=key.shape[3],
                value_head_dim=value.shape[3],
                sliding_window=sliding_window,
                mask=attention_mask,
                unknown=_unknown_options(options),
            )
        )
    layer = step.layers[module]
    step.kv.write(layer, step.rows, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = step.kv.attend(
        layer,
        query[0].transpose(0, 1),
        step.rows,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


# Options that do not change a causal decoder's attention, whatever their value.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def _unknown_options(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of options that may change what is attended to, and that nothing here honours."""
    return tuple(
        name
        for name, value in options.items()
        if value is not None
        and name not in _HARMLESS
        and not (name == "is_causal" and value is True)
    )


class MaskRule:
    """The visibility rule behind a mask: `rule(batch, head, query position, key position)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        zero = torch.tensor(0)
        return bool(self._function(zero, zero, torch.tensor(query), torch.tensor(key)))


def _rule_as_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor:
    """A mask that hides nothing and carries its rule along to the layers that are given it."""
    mask = torch.zeros(1, 1, 1, 1)
    mask.specreg_rule = MaskRule(mask_function)  # type: ignore[attr-defined]
    return mask


def register_attention() -> None:
    """Make both names known to `transformers`. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionInterface.register(PROBE_ATTENTION, attend)
    AttentionMaskInterface.register(PROBE_ATTENTION, _rule_as_mask)
