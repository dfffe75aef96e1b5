"""Ops on logits, keys and values: one folder each, with Triton kernel, torch twin and entry point.

Entry points dispatch on the device: Triton on CUDA and ROCm, the torch reference on CPU
and wherever Triton is not installed.
"""

import os

# Set before Triton is first imported. Whether `a * b + c` is contracted into one rounding depends
# on how a kernel was specialised; without it each operation rounds as in torch and in Triton's
# interpreter, so specialisations agree bit for bit and comparisons with the twins mean something.
# The ops are bound by memory: it costs no time.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

from specreg.kernels.cache_candidates.op import cache_candidates
from specreg.kernels.cell_statistics.op import cell_statistics
from specreg.kernels.draft_sample.op import draft_sample
from specreg.kernels.gumbel_sample.op import gumbel_sample
from specreg.kernels.markov_sample.op import markov_sample
from specreg.kernels.paged_attention.op import paged_attention, write_kv
from specreg.kernels.rejection_sample.op import rejection_sample
from specreg.kernels.shard_plan.op import shard_plan
from specreg.kernels.shard_plan.plan import ShardPlan

__all__ = [
    "ShardPlan",
    "cache_candidates",
    "cell_statistics",
    "draft_sample",
    "gumbel_sample",
    "markov_sample",
    "paged_attention",
    "rejection_sample",
    "shard_plan",
    "write_kv",
]
