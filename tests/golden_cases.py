"""Replays golden cases through the speculator protocol: states in, drafts and logits out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from specreg.capabilities import TargetNeeds
from specreg.config import EngineConfig
from specreg.draft_sampler import DraftSampler
from specreg.model_config import read_model_config
from specreg.registry import get_registry
from specreg.runtime.kv_pool import KVPool
from specreg.speculator import ProposeInputs, Speculator, SpeculatorContext
from specreg.testing.batches import decode_batch, prompt_batch

__all__ = ["CPU", "GoldenCase", "GoldenTarget", "Proposed", "Replay"]

FOLDER = Path(__file__).parent / "golden"
CPU = torch.device("cpu")
MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 3
SLOT = 1
GARBAGE = 1e4


class GoldenCase:
    """One case of the folder.

    Attributes:
        name: of its folder.
        facts: `scalars` of its `case.json`.
        num_rounds: rounds of drafting.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, FOLDER / name
        described = json.loads((self.folder / "case.json").read_text())
        self.facts: Mapping[str, Any] = described["scalars"]
        self.num_rounds: int = self.facts["num_rounds"]
        self._reused: Mapping[str, str] = described.get("weights_reused") or {}
        self._tensors = load_file(self.folder / "case.safetensors")

    def checkpoint(self, form: str, directory: Path) -> Path:
        """A complete copy of one of its checkpoint folders, to be changed at will."""
        copy = directory / f"{self.name}-{form}"
        shutil.copytree(self.folder / form, copy)
        if not (copy / "model.safetensors").exists():
            source = self._reused[form]
            shutil.copy(self.folder / source / "model.safetensors", copy)
        return copy

    def tensor(self, round_index: int, name: str) -> Tensor:
        """A tensor of a round, counted from 1; of the case itself for round 0."""
        return self._tensors[f"round{round_index}.{name}" if round_index else name]

    def has(self, round_index: int, name: str) -> bool:
        """Whether a round has a tensor of this name."""
        return f"round{round_index}.{name}" in self._tensors

    def integer(self, round_index: int, name: str) -> int:
        """A scalar of a round."""
        return int(self.tensor(round_index, name))


class GoldenTarget:
    """The target's ends as a `TargetView`; its states are inputs of the cases."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        self.config: Mapping[str, Any] = json.loads((FOLDER / "target.json").read_text())
        weights = load_file(FOLDER / "target.safetensors")
        self.embedding = weights["embed_tokens.weight"].to(device, dtype)
        self.head = weights["lm_head.weight"].to(device, dtype)
        self.vocab_size, self.hidden_size = self.embedding.shape
        self.num_layers: int = self.config["num_hidden_layers"]
        self.dtype, self.device = dtype, device

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.embedding)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.head)

    def compute_logits_local(self, hidden_states: Tensor) -> Tensor:
        return self.compute_logits(hidden_states)

    def kv(self, layer: int) -> Any:
        raise NotImplementedError


@dataclass
class Proposed:
    """One round's proposal: `tokens [K]` and what was sampled from, by step.

    Of a drafter of candidates `logits` are their scores, and `ids` are they.
    """

    tokens: list[int]
    logits: Tensor
    positions: list[int]
    ids: Tensor | None = None


class RecordingSampler(DraftSampler):
    """Notes the logits and positions of each step of the case's request."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.steps: dict[int, Tensor] = {}
        self.positions: dict[int, int] = {}
        self.ids: dict[int, Tensor] = {}

    def clear(self) -> None:
        for noted in (self.steps, self.positions, self.ids):
            noted.clear()

    def sample(self, logits: Tensor, step: int | Tensor, positions: Tensor) -> Tensor:
        self._note(logits, step, positions)
        return super().sample(logits, step, positions)

    def sample_candidates(
        self, ids: Tensor, scores: Tensor, step: int | Tensor, positions: Tensor
    ) -> Tensor:
        self._note(scores, step, positions, ids)
        return super().sample_candidates(ids, scores, step, positions)

    def _note(
        self, logits: Tensor, step: int | Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> None:
        num_rows = len(self._slots)
        steps = step.tolist() if isinstance(step, Tensor) else [step] * len(logits)
        rows = len(logits) // num_rows
        for row in range(len(logits)):
            if int(self._slots[row // rows]) == SLOT:
                self.steps[steps[row]] = logits[row].clone()
                self.positions[steps[row]] = int(positions[row])
                if ids is not None:
                    self.ids[steps[row]] = ids[row].clone()


@dataclass
class Replay:
    """A loaded speculator and the case it is asked about.

    Args:
        case: the case.
        speculative: method and options; the model and K are the case's own unless given.
        directory: where its checkpoint is copied to.
        form: name of the checkpoint folder.
        dtype: of the weights and states.
        target: the target; None is the golden one.
    """

    case: GoldenCase
    speculative: Mapping[str, Any]
    directory: Path
    form: str = "checkpoint"
    dtype: torch.dtype = torch.float32
    target: Any = None
    speculator: Speculator = field(init=False)
    needs: TargetNeeds = field(init=False)

    def __post_init__(self) -> None:
        target = self.target or GoldenTarget(self.dtype)
        keys = {"num_speculative_tokens": self.case.facts["num_draft_tokens"], **self.speculative}
        if "model" not in keys:
            keys["model"] = str(self.case.checkpoint(self.form, self.directory))
        config = EngineConfig.parse({"speculative": keys, "max_num_seqs": MAX_NUM_SEQS})
        assert config.speculative is not None
        selection = get_registry().select(
            config.speculative, read_model_config(keys["model"]), target.config
        )
        context = SpeculatorContext(
            spec=selection.spec,
            config=config.model_copy(update={"speculative": selection.speculative}),
            setup=selection.setup,
            draft_path=keys["model"],
            max_model_len=MAX_MODEL_LEN,
            device=CPU,
            dtype=self.dtype,
        )
        self.needs = selection.spec.needs_for(selection.setup)
        self.speculator = selection.spec.load_factory()(context)
        self.speculator.load_model(target)
        self.num_speculative_tokens = int(selection.speculative.num_speculative_tokens or 0)
        pool = KVPool(
            self.needs.kv_specs,
            num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // 4,
            block_size=4,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            dtype=self.dtype,
            device=CPU,
        )
        per_slot = MAX_MODEL_LEN // 4
        pool.assign(
            (slot, 0, range(slot * per_slot, (slot + 1) * per_slot)) for slot in range(MAX_NUM_SEQS)
        )
        self.sampler = RecordingSampler(
            cache=None,
            vocab_size=target.vocab_size,
            max_num_seqs=MAX_NUM_SEQS,
            num_speculative_tokens=self.num_speculative_tokens,
            device=CPU,
            greedy=True,
            target_ids=getattr(self.speculator, "target_ids", None),
        )
        self.temperature = torch.zeros(MAX_NUM_SEQS)
        self.seeds = torch.zeros(MAX_NUM_SEQS, dtype=torch.int64)
        self.speculator.bind(self.sampler, pool.view())

    def rounds(self, chunk: int | None = None) -> Iterator[tuple[int, Proposed]]:
        """Propose in each round of the case, which are counted from 1.

        Args:
            chunk: tokens of the prompt a step; None reads it in one.
        """
        for index in range(1, self.case.num_rounds + 1):
            for inputs in self._inputs(index, chunk):
                proposed = self._propose(inputs)
            yield index, proposed

    def _inputs(self, index: int, chunk: int | None) -> Iterator[ProposeInputs]:
        case = self.case
        rows, positions = (case.tensor(index, f"row_{name}") for name in ("ids", "positions"))
        num_valid, anchor = case.integer(index, "num_valid_rows"), case.integer(index, "anchor_id")
        ids, start = rows.tolist(), int(positions[0])
        common: dict[str, Any] = {
            "temperature": self.temperature,
            "seeds": self.seeds,
            "num_draft_tokens": self.num_speculative_tokens,
        }
        if index > 1:
            rejected = len(ids) - num_valid
            common["prefill_lookahead"] = self.needs.prefill_lookahead
            batch = decode_batch([ids], [start], [SLOT], [rejected], [anchor], **common)
            yield self._with_states(batch, index, 0, num_valid)
            return
        step, ahead = chunk or len(ids), max(1, self.needs.prefill_lookahead)
        for first in range(0, len(ids), step):
            part, rest = ids[first : first + step], ids[first + step :]
            following = [*rest, *[-1] * ahead][:ahead]
            batch = prompt_batch(
                [part],
                [SLOT],
                [-1 if rest else anchor],
                starts=[start + first],
                lookahead=[following],
                **common,
            )
            yield self._with_states(batch, index, first, num_valid)

    def _with_states(
        self, inputs: ProposeInputs, index: int, first: int, num_valid: int
    ) -> ProposeInputs:
        rows = slice(first, first + inputs.num_tokens)

        def states(name: str) -> Tensor:
            # Nothing may depend on the states of rows that were rejected.
            kept = self.case.tensor(index, name).clone()
            kept[num_valid:] = GARBAGE
            return kept[rows].to(self.dtype)

        changes: dict[str, Any] = {}
        if self.needs.aux_layer_ids:
            changes["aux_hidden_states"] = states("aux_hidden")
        kind = self.needs.hidden_states.value
        if kind != "none":
            name = "target_hidden" if kind == "post_norm" else "target_hidden_prenorm"
            changes["hidden_states"] = states(name)
        return replace(inputs, **changes)

    def _propose(self, inputs: ProposeInputs) -> Proposed:
        self.sampler.clear()
        self.sampler.begin(
            inputs.idx_mapping, inputs.sample_idx_mapping, self.temperature, self.seeds
        )
        output = self.speculator.propose(inputs)
        steps, ids = sorted(self.sampler.steps), self.sampler.ids
        return Proposed(
            tokens=output.tokens[0].tolist(),
            logits=torch.stack([self.sampler.steps[step] for step in steps])
            if steps
            else torch.empty(0),
            positions=[self.sampler.positions[step] for step in steps],
            ids=torch.stack([ids[step] for step in steps]) if ids else None,
        )
