"""Altered checkpoints of DSpark drafters, and a replay that shows what passes through one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from golden_cases import GoldenCase, Replay
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["Change", "Watched", "altered", "config_of", "load"]

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def config_of(case: str, form: str) -> dict[str, Any]:
    """The config of one of a case's forms."""
    config: dict[str, Any] = json.loads(
        (GoldenCase(case).folder / form / "config.json").read_text()
    )
    return config


def altered(case: str, folder: Path, change: Change, form: str = "checkpoint_dense") -> Path:
    """Copy a case's checkpoint, change it and write it back."""
    directory = GoldenCase(case).checkpoint(form, folder)
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(
    case: str,
    folder: Path,
    change: Change = lambda t, c: None,
    form: str = "checkpoint_dense",
    **k: Any,
) -> Any:
    """The loaded speculator of a changed case."""
    keys = {"method": "dspark", "model": str(altered(case, folder, change, form))}
    return Replay(GoldenCase(case), keys, folder, **k).speculator


class Watched:
    """A replay that keeps what passed through the speculator in the newest round.

    Attributes:
        hidden: `[1, num_block_rows, hidden_size]`.
        confidence: `[1, K]`, or None.
    """

    def __init__(
        self,
        name: str,
        form: str,
        folder: Path,
        change: Change | None = None,
        dtype: torch.dtype = torch.float32,
        **keys: Any,
    ) -> None:
        self.case = GoldenCase(name)
        if change is not None:
            keys["model"] = str(altered(name, folder, change, form))
        speculative = {"method": "dspark", **keys}
        self.replay = Replay(self.case, speculative, folder, form=form, dtype=dtype)
        self.speculator: Any = self.replay.speculator
        self.hidden = torch.empty(0)
        self.confidence: Any = None
        propose_block = self.speculator.propose_block

        def watched(hidden: Tensor, *rest: Any) -> Any:
            output = propose_block(hidden, *rest)
            self.hidden, self.confidence = hidden, output.confidence
            return output

        self.speculator.propose_block = watched

    @property
    def rows(self) -> Tensor:
        """Rows of the drafts, `[1, K, hidden_size]`."""
        first = self.speculator.config.first_row
        return self.hidden[:, first : first + self.speculator.num_speculative_tokens]

    def before(self, index: int, tokens: list[int]) -> Tensor:
        """Tokens before the drafts of a round, `[K]`: the anchor and all drafts but the last."""
        return torch.tensor([self.case.integer(index, "anchor_id"), *tokens[:-1]])
