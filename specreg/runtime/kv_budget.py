"""How many KV blocks fit beside everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specreg.config import EngineConfig
from specreg.errors import ConfigError
from specreg.memory import GIB

__all__ = ["KVBudget", "scratch_bytes"]

# fp32 copies of a step's logits that live at once: head output, exchanged rows, sampler's scratch.
NUM_LOGITS_COPIES = 3


def scratch_bytes(max_num_seqs: int, num_speculative_tokens: int, vocab_size: int) -> int:
    """Bytes that a step's logits take at most, on top of what stays allocated."""
    num_logits = max_num_seqs * (num_speculative_tokens + 1)
    return NUM_LOGITS_COPIES * num_logits * vocab_size * torch.float32.itemsize


@dataclass(frozen=True)
class KVBudget:
    """What the KV pool may take beside everything else on a rank.

    Attributes:
        config: gives the budget: bytes on CPU, a share of the device on GPU.
        block_bytes: of one block over all layers.
        max_model_len: the pool must hold one request of this length.
        weight_bytes: of target and drafter.
        scratch_bytes: from the function of this name.
        device: of the run.
    """

    config: EngineConfig
    block_bytes: int
    max_model_len: int
    weight_bytes: int
    scratch_bytes: int
    device: torch.device

    def num_blocks(self, draft_logits_bytes: int) -> int:
        """Blocks beside a draft-logits cache of `draft_logits_bytes`.

        Raises:
            ConfigError: less than one longest request fits.
        """
        config = self.config
        num_blocks = config.num_kv_blocks
        resident = self.weight_bytes + draft_logits_bytes + self.scratch_bytes
        if num_blocks is None:
            num_blocks = max(0, self._budget_bytes() - resident) // self.block_bytes
            num_blocks -= 1  # The pool adds a null block.
        if num_blocks * config.block_size < self.max_model_len:
            raise ConfigError(
                "the KV pool cannot hold one request",
                where="memory_budget_gib, gpu_memory_utilization or num_kv_blocks",
                got=f"{max(0, num_blocks)} blocks of {config.block_size} positions beside "
                f"{resident / GIB:.2f} GiB of weights, draft logits and scratch; allowed: room for "
                f"max_model_len = {self.max_model_len}",
                fix="raise the budget, or lower max_model_len or max_num_seqs",
            )
        return num_blocks

    def _budget_bytes(self) -> int:
        if self.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self.device)
            return int(total * self.config.gpu_memory_utilization)
        return int(self.config.memory_budget_gib * GIB)
