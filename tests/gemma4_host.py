"""A tiny Gemma 4 target with an assistant, in a host of its own, and the assistant in plain torch.

`explicit_draft` is written from the formulas alone: cross-attention over keys and values that the
caller has cut, with no cache, mask or module of the project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from golden_cases import RecordingSampler
from safetensors.torch import load_file
from specreg_mtp.gemma4_speculator import Gemma4Speculator
from torch import Tensor

from specreg.config import EngineConfig
from specreg.model_config import read_model_config
from specreg.registry import get_registry
from specreg.runtime.target import Target
from specreg.specs import DraftSetup
from specreg.speculator import DraftOutput, ProposeInputs, SpeculatorContext
from specreg.testing.packed import PackedRequests

__all__ = ["MAX_MODEL_LEN", "SLOT", "Host", "K", "explicit_draft", "load_gemma4"]

K = 3
MAX_NUM_SEQS = 3
MAX_MODEL_LEN = 64
SLOT = 1  # the slot whose logits the host's sampler keeps


def load_gemma4(
    draft: Path | str,
    target: Any,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    **speculative: Any,
) -> Gemma4Speculator:
    """The loaded speculator, selected by its checkpoint and the method `mtp`."""
    keys = {"method": "mtp", "model": str(draft), "num_speculative_tokens": K, **speculative}
    config = EngineConfig.parse({"speculative": keys, "max_num_seqs": MAX_NUM_SEQS})
    assert config.speculative is not None
    selection = get_registry().select(
        config.speculative, read_model_config(str(draft)), target.config
    )
    context = SpeculatorContext(
        spec=selection.spec,
        config=config.model_copy(update={"speculative": selection.speculative}),
        setup=DraftSetup(read_model_config(str(draft)) or {}, target.config, K, None),
        draft_path=str(draft),
        max_model_len=max_model_len,
        device=target.device,
        dtype=target.dtype,
    )
    speculator = selection.spec.load_factory()(context)
    speculator.load_model(target)
    assert isinstance(speculator, Gemma4Speculator)
    return speculator


@dataclass
class Host:
    """A target whose requests run one step at a time, and its speculator.

    Args:
        target_path, draft_path: checkpoints.
        keys: keys of the speculative config, or `max_model_len` of the drafter.
    """

    target_path: Path
    draft_path: Path
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = Target.load(self.target_path)
        self.requests = PackedRequests(self.target, MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
        self.pool = self.requests.pool
        self.target.attach_kv(self.pool.view(0, is_read_only=True))
        self.speculator = load_gemma4(self.draft_path, self.target, **self.keys)
        self.temperature = torch.zeros(MAX_NUM_SEQS)
        self.seeds = torch.zeros(MAX_NUM_SEQS, dtype=torch.int64)
        self.sampler = RecordingSampler(
            cache=None,
            vocab_size=self.target.vocab_size,
            max_num_seqs=MAX_NUM_SEQS,
            num_speculative_tokens=K,
            device=self.target.device,
            greedy=True,
        )
        self.speculator.bind(self.sampler, self.pool.view(len(self.target.kv_specs)))

    def read(self, slot: int, first: int, token_ids: Sequence[int]) -> Tensor:
        """Let the target read tokens of a request; returns its states, `[n, hidden_size]`."""
        return self.requests.step([(slot, first, token_ids)])[0].hidden

    def kv(self, slot: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer at positions 0 .. length-1, `[length, heads, dim]`."""
        pool = self.pool
        positions = torch.arange(length)
        blocks = pool.block_table[slot, positions // pool.block_size].long()
        inside = positions % pool.block_size
        return [
            (k[blocks, inside], v[blocks, inside])
            for k, v in zip(pool.keys, pool.values, strict=True)
        ]

    def propose(self, inputs: ProposeInputs) -> DraftOutput:
        """Propose; `sampler.steps` and `sampler.positions` tell what `SLOT` was sampled from."""
        self.sampler.steps.clear()
        self.sampler.positions.clear()
        self.sampler.begin(
            inputs.idx_mapping, inputs.sample_idx_mapping, self.temperature, self.seeds
        )
        return self.speculator.propose(inputs)

    @property
    def logits(self) -> Tensor:
        """`[K, vocab_size]` of the last proposal of `SLOT`."""
        return torch.stack([self.sampler.steps[step] for step in range(K)])


def explicit_draft(
    draft_path: Path,
    target: Target,
    newest: int,
    state: Tensor,
    position: int,
    kv: Mapping[str, tuple[Tensor, Tensor]],
) -> tuple[list[int], Tensor]:
    """K greedy drafts and their logits `[K, vocab_size]`.

    Args:
        draft_path: an assistant with a dense, tied head, of default rotary embeddings.
        target: embeds tokens.
        newest: the newest token.
        state: the target's, `[hidden_size]`.
        position: of the query.
        kv: keys and values `[length, heads, dim]` by layer type, all of which are seen.
    """
    weights = load_file(draft_path / "model.safetensors")
    text = (read_model_config(str(draft_path)) or {})["text_config"]
    tokens, logits = [], []
    token = newest
    for _ in range(K):
        embedded = target.embed(torch.tensor([token]))[0]
        stream = weights["pre_projection.weight"] @ torch.cat([embedded, state])
        for index, kind in enumerate(text["layer_types"]):
            stream = _layer(weights, f"model.layers.{index}.", text, kind, stream, position, kv)
        final = _rms(stream, weights["model.norm.weight"], text)
        state = weights["post_projection.weight"] @ final
        logits.append(weights["model.embed_tokens.weight"] @ final)
        token = int(logits[-1].argmax())
        tokens.append(token)
    return tokens, torch.stack(logits)


def _layer(
    weights: Mapping[str, Tensor],
    prefix: str,
    text: Mapping[str, Any],
    kind: str,
    stream: Tensor,
    position: int,
    kv: Mapping[str, tuple[Tensor, Tensor]],
) -> Tensor:
    def weight(name: str) -> Tensor:
        return weights[prefix + name]

    def norm(name: str, x: Tensor) -> Tensor:
        return _rms(x, weight(f"{name}_layernorm.weight"), text)

    keys, values = kv[kind]
    num_heads, num_kv_heads = text["num_attention_heads"], keys.shape[1]
    queries = weight("self_attn.q_proj.weight") @ norm("input", stream)
    heads = []
    for head, query in enumerate(queries.view(num_heads, -1)):
        query = _rms(query, weight("self_attn.q_norm.weight"), text)
        query = _turned(query, position, kind)
        group = head // (num_heads // num_kv_heads)
        scores = keys[:, group] @ query
        heads.append(scores.softmax(0) @ values[:, group])
    attended = weight("self_attn.o_proj.weight") @ torch.cat(heads)
    stream = stream + norm("post_attention", attended)
    x = norm("pre_feedforward", stream)
    gate = F.gelu(weight("mlp.gate_proj.weight") @ x, approximate="tanh")
    fed = weight("mlp.down_proj.weight") @ (gate * (weight("mlp.up_proj.weight") @ x))
    return (stream + norm("post_feedforward", fed)) * weight("layer_scalar")


def _rms(x: Tensor, weight: Tensor, text: Mapping[str, Any]) -> Tensor:
    return x / (x.pow(2).mean() + text.get("rms_norm_eps", 1e-6)).sqrt() * weight


def _turned(query: Tensor, position: int, kind: str) -> Tensor:
    """Half-split rotation: all pairs of a sliding layer's head, a quarter of a full layer's."""
    half = len(query) // 2
    theta, num_pairs = (1e4, half) if kind == "sliding_attention" else (1e6, half // 4)
    turned = query.clone()
    for pair in range(num_pairs):
        angle = position * theta ** (-2 * pair / len(query))
        a, b = query[pair], query[pair + half]
        turned[pair] = a * math.cos(angle) - b * math.sin(angle)
        turned[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned
