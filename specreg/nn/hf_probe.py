"""The proof, made once at load, that a Hugging Face decoder runs right on paged keys and values.

Three short forwards over two requests of a few tokens: the model's own (eager attention, no cache);
one request alone through the registered attention function, where each layer's mask rule is read;
and the rest packed, with a padding row between the requests. Refused is a model of which

- a layer does not call the registered function once, or hands it something it does not honour;
- a layer's mask rule is neither causal nor the causal window that it asks for;
- a layer's shapes are not those that `kv_specs_from_config` reads from its config;
- the hidden states differ from the model's own, naming the first layer after which they do;
- the logits of the head differ from the model's own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from specreg.capabilities import KVLayerSpec
from specreg.errors import SpecregError, TargetError
from specreg.kernels import paged_attention, write_kv
from specreg.nn.hf_attention import (
    ATTENTION,
    PROBE_ATTENTION,
    AttentionCall,
    DecoderStep,
    MaskRule,
)
from specreg.nn.hf_structure import DecoderStructure, describe
from specreg.nn.kv_specs import kv_specs_from_config
from specreg.nn.lm_head import LMHead
from specreg.nn.residual_taps import ResidualTaps
from specreg.speculator import KVRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ProbeFindings", "probe"]

NUM_TOKENS = 6
FAR = 100_003  # a position beyond every chunk or block that a mask rule may hide in


class ProbeFindings(NamedTuple):
    """What only running the model tells.

    Attributes:
        kv_specs: one a layer.
        head: equal to the model's own logits on the probe.
        final_norm: the module whose output the head reads; None when there is none.
        has_flat_residual: whether every layer's input is `[1, num_tokens, hidden_size]`.
    """

    kv_specs: tuple[KVLayerSpec, ...]
    head: LMHead
    final_norm: nn.Module | None
    has_flat_residual: bool


@torch.no_grad()
def probe(model: PreTrainedModel, structure: DecoderStructure) -> ProbeFindings:
    """Run the proof and leave the model on the registered attention function.

    Raises:
        TargetError: naming the layer or module at fault.
    """
    try:
        return _probe(model, structure)
    except SpecregError:
        raise
    except Exception as error:
        raise TargetError(
            "the model cannot run packed requests",
            where=f"{type(model).__name__}, load-time probe",
            got=f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}; allowed: "
            "a forward from input_ids and position_ids through the registered attention function",
            fix="use a model that follows transformers' attention interface",
        ) from error


def _probe(model: PreTrainedModel, structure: DecoderStructure) -> ProbeFindings:
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    device = next(structure.decoder.parameters()).device
    # Neighbouring ids far apart in the vocabulary, none of them the first few, which pad and mark.
    span = min(int(model.config.get_text_config().vocab_size), embedding.num_embeddings)
    ids = (torch.arange(2 * NUM_TOKENS, device=device) * 7919 + span // 3) % span
    ids = ids.view(2, NUM_TOKENS)
    kv = _ProbeKV(device)
    taps = ResidualTaps(structure.layers)
    taps.arm(range(len(structure.layers)))

    # Request 0 alone, all but its last two tokens: calls and mask rules.
    model.set_attn_implementation(PROBE_ATTENTION)
    calls: list[AttentionCall] = []
    split = NUM_TOKENS - 2
    alone = _rows(device, (0, 0, split))
    first = _run(structure, ids[0, :split], DecoderStep(alone, kv, structure.layer_of, calls), taps)
    kv_specs = _check_calls(structure, calls)
    _check_config(model, structure, kv_specs)

    # The rest of request 0, a padding row, and all of request 1.
    model.set_attn_implementation(ATTENTION)
    packed = _rows(device, (0, split, NUM_TOKENS), (-1, 0, 1), (1, 0, NUM_TOKENS))
    packed_ids = torch.cat([ids[0, split:], ids[0, :1], ids[1]])
    calls = []
    second = _run(structure, packed_ids, DecoderStep(packed, kv, structure.layer_of, calls), taps)
    for call in calls:
        if call.mask is not None:
            raise _unlike_causal(structure, call, "a mask of its own making")

    own = _run_own(model, structure, ids, taps)
    model.set_attn_implementation(ATTENTION)
    taps.arm(())
    keep = [*range(2), *range(3, 3 + NUM_TOKENS)]
    ours = [torch.cat([a, b[..., keep, :]], dim=-2) for a, b in zip(first, second, strict=True)]
    _check_states(structure, own.states, ours)
    return ProbeFindings(
        kv_specs=kv_specs,
        head=_find_head(model, own.states[-1], own.logits),
        final_norm=own.final_norm,
        has_flat_residual=all(state.dim() == 3 and state.shape[0] == 1 for state in first),
    )


def _rows(device: torch.device, *requests: tuple[int, int, int]) -> KVRows:
    """Causal rows of (slot, first position, last position + 1)."""
    return KVRows.causal(
        torch.tensor([slot for slot, a, b in requests for _ in range(a, b)], device=device),
        torch.tensor([p for _, a, b in requests for p in range(a, b)], device=device),
    )


def _run(
    structure: DecoderStructure, ids: Tensor, step: DecoderStep, taps: ResidualTaps
) -> list[Tensor]:
    """Input of every layer, then the final states."""
    with step.running():
        output = structure.decoder(
            input_ids=ids[None], position_ids=step.rows.positions[None], use_cache=False
        )
    return [*taps.take().values(), output.last_hidden_state]


def _check_calls(
    structure: DecoderStructure, calls: list[AttentionCall]
) -> tuple[KVLayerSpec, ...]:
    counts = Counter(structure.layer_of[call.module] for call in calls)
    for index, (layer, name) in enumerate(
        zip(structure.layers, structure.layer_names, strict=True)
    ):
        if counts[index] != 1:
            raise TargetError(
                "a layer does not attend through the registered attention function",
                where=name,
                got=f"{counts[index]} calls from {describe(layer)}; allowed: exactly 1",
                fix="use a decoder whose layers all attend, once each, through transformers' "
                "AttentionInterface",
            )
    specs = []
    for call in sorted(calls, key=lambda call: structure.layer_of[call.module]):
        if call.unknown:
            raise _unlike_causal(structure, call, f"options {', '.join(call.unknown)}")
        rule = getattr(call.mask, "specreg_rule", None)
        if rule is not None and not _is_causal_window(rule, call.sliding_window):
            raise _unlike_causal(
                structure, call, f"a mask unlike its sliding_window {call.sliding_window}"
            )
        value_head_dim = call.value_head_dim if call.value_head_dim != call.head_dim else None
        specs.append(
            KVLayerSpec(
                call.num_kv_heads,
                call.head_dim,
                sliding_window=call.sliding_window,
                value_head_dim=value_head_dim,
            )
        )
    return tuple(specs)


def _is_causal_window(rule: MaskRule, window: int | None) -> bool:
    """Whether a rule shows exactly the newest `window` keys (all of them if None), near and far."""
    reach = window or 8
    for query in (0, 1, reach - 1, reach, reach + 1, 3 * reach + 1, FAR):
        for key in {0, query - reach, query - reach + 1, query - 1, query, query + 1}:
            is_visible = key <= query and (window is None or key > query - window)
            if key >= 0 and rule.sees(query, key) != is_visible:
                return False
    return True


def _unlike_causal(structure: DecoderStructure, call: AttentionCall, got: str) -> TargetError:
    name = structure.layer_names[structure.layer_of[call.module]]
    return TargetError(
        "a layer's attention is not one that paged keys and values serve",
        where=f"{name} ({type(call.module).__name__})",
        got=f"{got}; allowed: causal attention, with a sliding window, a soft cap and sinks",
        fix="use a model without this kind of attention",
    )


def _check_config(
    model: PreTrainedModel, structure: DecoderStructure, observed: tuple[KVLayerSpec, ...]
) -> None:
    read = kv_specs_from_config(model.config.to_dict())
    for name, ours, theirs in zip(structure.layer_names, read, observed, strict=True):
        if ours != theirs:
            raise TargetError(
                "config.json and the loaded model disagree about a layer's keys and values",
                where=name,
                got=f"{theirs} in the model; from config.json: {ours}",
                fix="report this architecture to specreg: its config is read wrongly",
            )


@dataclass
class _OwnRun:
    states: list[Tensor]
    logits: Tensor
    final_norm: nn.Module | None


def _run_own(
    model: PreTrainedModel, structure: DecoderStructure, ids: Tensor, taps: ResidualTaps
) -> _OwnRun:
    """The model's own forward, and which module made what the head reads."""
    model.set_attn_implementation("eager")
    outputs: dict[nn.Module, Any] = {}
    watched = [structure.decoder, *structure.decoder.children()]
    handles = [
        module.register_forward_hook(lambda module, _, output: outputs.update({module: output}))
        for module in watched
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    last = outputs[structure.decoder].last_hidden_state
    norm = next((m for m in reversed(watched[1:]) if _is_same_memory(outputs.get(m), last)), None)
    states = [*taps.take().values(), last]
    return _OwnRun([_packed(state) for state in states], logits.flatten(0, 1), norm)


def _is_same_memory(output: Any, state: Tensor) -> bool:
    return (
        isinstance(output, Tensor)
        and output.data_ptr() == state.data_ptr()
        and output.numel() == state.numel()
    )


def _packed(state: Tensor) -> Tensor:
    """`[..., 2, n, h]` as one request after the other, `[..., 1, 2 * n, h]`."""
    return state.flatten(-3, -2).unsqueeze(-3)


def _check_states(structure: DecoderStructure, own: list[Tensor], ours: list[Tensor]) -> None:
    names = ("the embedding", *structure.layer_names)
    for name, theirs, mine in zip(names, own, ours, strict=True):
        error = _relative_error(theirs, mine, theirs.dtype)
        if error > _tolerance(theirs.dtype):
            raise TargetError(
                "packed requests do not reproduce the model's own forward",
                where=f"first seen after {name}",
                got=f"relative difference {error:.1e}; allowed: {_tolerance(theirs.dtype):.0e}",
                fix="use another target: this one keeps a state between tokens, or mixes requests",
            )


def _relative_error(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> float:
    """Of the worst row in fp32; below, of the median row: a router may flip at a near-tie."""
    difference = (expected.double() - actual.double()).norm(dim=-1).flatten()
    size = expected.double().norm(dim=-1).flatten().clamp(min=1e-30)
    errors = difference / size
    return float(errors.max() if dtype.itemsize >= 4 else errors.median())


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype.itemsize >= 4 else 0.1


def _find_head(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> LMHead:
    """The head whose logits are the model's own, among those that the config's factors suggest."""
    linear: nn.Linear = cast(Any, model).get_output_embeddings()
    config = model.config.get_text_config()
    vocab_size = min(int(config.vocab_size), linear.weight.shape[0])
    bare = LMHead(linear.weight.detach(), linear.bias).rows(0, vocab_size)
    factor = getattr(config, "logits_scaling", None)
    multiplier = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None)
    soft_cap = getattr(config, "final_logit_softcapping", None)
    candidates = [
        LMHead(bare.weight, bare.bias, multiplier, factor, soft_cap),
        LMHead(bare.weight, bare.bias, factor, None, soft_cap),
        bare,
    ]
    expected = logits[:, :vocab_size]
    errors = [_relative_error(expected, head(hidden[0]), hidden.dtype) for head in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if errors[best] > _tolerance(hidden.dtype) / 10:
        raise TargetError(
            "the logits are not those of the head",
            where=f"{type(model).__name__}, {type(linear).__name__} after the final norm",
            got=f"relative difference {errors[best]:.1e} with logits_scaling={factor}, "
            f"logit_scale={multiplier}, final_logit_softcapping={soft_cap}; allowed: a linear head "
            "with these",
            fix="use a model whose logits are a linear function of its final states",
        )
    return candidates[best]


class _ProbeKV:
    """A `KVView` for two requests of one block each; layers appear as they are written."""

    def __init__(self, device: torch.device) -> None:
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}
        self._block_table = torch.tensor([[1], [2]], device=device)

    def write(self, layer: int, rows: KVRows, key: Tensor, value: Tensor) -> None:
        if layer not in self._pools:
            self._pools[layer] = (
                key.new_zeros(3, NUM_TOKENS, *key.shape[1:]),
                value.new_zeros(3, NUM_TOKENS, *value.shape[1:]),
            )
        pools = self._pools[layer]
        write_kv(*pools, self._block_table, rows.slots, rows.positions, key, value)

    def attend(self, layer: int, query: Tensor, rows: KVRows, **options: Any) -> Tensor:
        return paged_attention(
            query,
            *self._pools[layer],
            self._block_table,
            rows.slots,
            rows.positions,
            rows.kv_lens,
            **options,
        )
