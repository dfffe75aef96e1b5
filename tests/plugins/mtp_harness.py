"""A speculator by itself: states of a made-up target in, drafts and logits out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from golden_cases import RecordingSampler
from torch import Tensor

from specreg.config import EngineConfig
from specreg.model_config import read_model_config
from specreg.registry import get_registry
from specreg.runtime.kv_pool import KVPool
from specreg.speculator import ProposeInputs, SpeculatorContext
from specreg.testing.batches import decode_batch, prompt_batch, with_padding

__all__ = ["HIDDEN_SIZE", "VOCAB_SIZE", "Harness", "MadeUpTarget"]

HIDDEN_SIZE, VOCAB_SIZE, NUM_LAYERS = 32, 17, 2
MAX_MODEL_LEN, BLOCK_SIZE = 64, 4
MAX_NUM_SEQS, SLOT = 3, 1  # the slot that RecordingSampler listens to


class MadeUpTarget:
    """Ends of a target, and states that are a table of position and token."""

    def __init__(self, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB_SIZE) -> None:
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(vocab_size, HIDDEN_SIZE, generator=generator).to(dtype)
        self.head = (0.4 * torch.randn(vocab_size, HIDDEN_SIZE, generator=generator)).to(dtype)
        self.table = torch.randn(MAX_MODEL_LEN, vocab_size, HIDDEN_SIZE, generator=generator)
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, HIDDEN_SIZE, NUM_LAYERS
        self.config: Mapping[str, Any] = {"model_type": "llama", "hidden_size": HIDDEN_SIZE}
        self.dtype, self.device = dtype, torch.device("cpu")

    def states(self, tokens: Sequence[int], start: int = 0) -> Tensor:
        positions = torch.arange(start, start + len(tokens))
        return self.table[positions, torch.tensor(list(tokens))].to(self.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.head.T

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states)

    def kv(self, layer: int) -> Any:
        raise NotImplementedError


class Harness:
    """A loaded speculator with its KV.

    Args:
        speculative: its configuration, with a `model`.
        num_steps: K.
        target: None makes one up.
        dtype: of the run.
        max_model_len: positions that are drafted for.
    """

    def __init__(
        self,
        speculative: Mapping[str, Any],
        num_steps: int = 3,
        target: MadeUpTarget | None = None,
        dtype: torch.dtype = torch.float32,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.target = target or MadeUpTarget(dtype)
        keys = {**speculative, "num_speculative_tokens": num_steps}
        config = EngineConfig.parse({"speculative": keys, "max_num_seqs": MAX_NUM_SEQS})
        assert config.speculative is not None
        selection = get_registry().select(
            config.speculative, read_model_config(keys["model"]), self.target.config
        )
        self.spec = selection.spec
        context = SpeculatorContext(
            spec=selection.spec,
            config=config.model_copy(update={"speculative": selection.speculative}),
            setup=selection.setup,
            draft_path=keys["model"],
            max_model_len=max_model_len,
            device=torch.device("cpu"),
            dtype=dtype,
        )
        self.needs = selection.spec.needs_for(selection.setup)
        self.num_steps = num_steps
        self.speculator: Any = selection.spec.load_factory()(context)
        self.speculator.load_model(self.target)
        self.pool = self.make_pool()
        self.sampler = RecordingSampler(
            cache=None,
            vocab_size=self.target.vocab_size,
            max_num_seqs=MAX_NUM_SEQS,
            num_speculative_tokens=num_steps,
            device="cpu",
            greedy=True,
        )
        self.common = {
            "temperature": torch.zeros(MAX_NUM_SEQS),
            "seeds": torch.zeros(MAX_NUM_SEQS, dtype=torch.int64),
        }
        self.speculator.bind(self.sampler, self.pool.view())
        self.tokens: list[int] = []
        self.drafts: list[int] = []

    def make_pool(self) -> KVPool:
        """KV of its layers for every slot."""
        per_slot = MAX_MODEL_LEN // BLOCK_SIZE
        pool = KVPool(
            self.needs.kv_specs,
            num_blocks=MAX_NUM_SEQS * per_slot,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            dtype=self.target.dtype,
            device=torch.device("cpu"),
        )
        pool.assign(
            (slot, 0, range(slot * per_slot, (slot + 1) * per_slot)) for slot in range(MAX_NUM_SEQS)
        )
        return pool

    def prompt(self, tokens: Sequence[int], newest: int, chunk: int | None = None) -> Tensor:
        """Read a prompt, in chunks; the logits of the proposal behind it."""
        size = chunk or len(tokens)
        ahead = max(1, self.needs.prefill_lookahead)
        firsts = self._chunks(len(tokens), size, ahead)
        for first, end in zip(firsts, [*firsts[1:], len(tokens)], strict=True):
            rest = list(tokens[end:])
            inputs = prompt_batch(
                [tokens[first:end]],
                [SLOT],
                [-1 if rest else newest],
                starts=[first],
                lookahead=[[*rest, *[-1] * ahead][:ahead]],
                num_draft_tokens=self.num_steps,
                **self.common,
            )
            self._propose(inputs, self.target.states(tokens[first:end], first))
        self.tokens = [*tokens, newest]
        return self.logits

    def verified(self, num_accepted: int, newest: int, num_drafts: int | None = None) -> Tensor:
        """Verify `num_drafts` drafts (None: all), some of which are accepted; the next logits."""
        read = [self.tokens[-1], *self.drafts[:num_drafts]]
        start = len(self.tokens) - 1
        inputs = decode_batch(
            [read],
            [start],
            [SLOT],
            [len(read) - 1 - num_accepted],
            [newest],
            num_draft_tokens=self.num_steps,
            **self.common,
        )
        ahead = torch.full((max(1, self.needs.prefill_lookahead), 1), -1)
        inputs = replace(inputs, next_prefill_tokens=ahead)
        states = self.target.states(read, start).clone()
        states[num_accepted + 1 :] = 1e4  # states of rejected rows have no part in it
        self._propose(inputs, states)
        self.tokens += [*read[1 : num_accepted + 1], newest]
        return self.logits

    @staticmethod
    def _chunks(num_tokens: int, size: int, ahead: int) -> list[int]:
        """Where chunks begin: what remains is nothing, or at least the look-ahead."""
        firsts = [0]
        while num_tokens - firsts[-1] > size:
            following = firsts[-1] + size
            firsts.append(min(following, max(firsts[-1] + 1, num_tokens - ahead)))
        return firsts

    def _propose(self, inputs: ProposeInputs, states: Tensor) -> None:
        inputs = replace(inputs, hidden_states=states)
        inputs, own = with_padding(inputs, [0, 1])
        self.sampler.steps.clear()
        self.sampler.begin(inputs.idx_mapping, inputs.sample_idx_mapping, **self.common)
        output = self.speculator.propose(inputs)
        self.drafts = output.tokens[own[0]].tolist()
        steps = sorted(self.sampler.steps)
        self.logits = torch.stack([self.sampler.steps[s] for s in steps]) if steps else Tensor()
