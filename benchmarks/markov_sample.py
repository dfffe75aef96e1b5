"""What do the sequential steps of a Markov head cost, fused, against a loop and against the bytes?

The loop adds the bias in torch and calls `draft_sample`, once a step; both are replayed from a
graph. A case is timed only after the fused rows are those of the twin, given the tokens before
them, and the fused tokens those that `draft_sample` draws from the fused rows. The limit is
`K (V rank s + R V s (1 + 1/num_shards))` bytes over the bandwidth of a device-to-device copy
measured in the same run (bytes read and written): each step has to read the head's second table.

The launch of a step draws the tokens of the step before once a call, so repeats of it alone, the
times of single launches, leave the draws out. `--sweep` times whole calls.

    python benchmarks/markov_sample.py [--json FILE] [--sweep]
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch
from drafts import BF16, Case, cache_for
from timing import event_times_us, graph_of, measure, run_script, sweep
from torch import Tensor

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import draft_sample, markov_sample
from specreg.kernels.markov_sample import arguments as sizes
from specreg.kernels.markov_sample import kernel
from specreg.kernels.markov_sample.reference import markov_bias_reference

NUM_STEPS, VOCAB_SIZE, RANK = 5, 129_280, 256
HEADER = "requests  K  vocabulary  dtype    shards"
CASES = [
    Case(num_reqs, NUM_STEPS, VOCAB_SIZE, BF16, num_shards)
    for num_reqs in (1, 8, 64, 256)
    for num_shards in (1, 4)
]


class Inputs(NamedTuple):
    """Positional arguments of `markov_sample`, without the cache."""

    base_logits: Tensor
    anchors: Tensor
    idx_mapping: Tensor
    positions: Tensor
    w1: Tensor
    w2: Tensor
    temperature: Tensor
    seeds: Tensor


def inputs_of(case: Case) -> Inputs:
    """Logits of standard deviation 3, a bias of 1."""
    slots = torch.arange(case.num_reqs, device="cuda")

    def normal(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=case.dtype, device="cuda").normal_(0, std)

    return Inputs(
        base_logits=normal(case.num_reqs, case.num_speculative_tokens, case.vocab_size, std=3),
        anchors=slots + 100,
        idx_mapping=slots,
        positions=slots + 1000,
        w1=normal(case.vocab_size, RANK, std=1),
        w2=normal(case.vocab_size, RANK, std=RANK**-0.5),
        temperature=torch.full((case.num_reqs,), 0.8, device="cuda"),
        seeds=slots,
    )


def draw(inputs: Inputs, logits: Tensor, step: int, cache: DraftLogitsView | None) -> Tensor:
    """The tokens of a step by `draft_sample`."""
    return draft_sample(
        logits,
        inputs.idx_mapping,
        torch.full_like(inputs.idx_mapping, step),
        inputs.positions + step,
        inputs.temperature,
        inputs.seeds,
        cache,
        vocab_size=logits.shape[1],
    )


def loop(inputs: Inputs, cache: DraftLogitsView) -> Tensor:
    """What is compared with: a matrix product, a sum and `draft_sample`, once a step."""
    tokens, previous = [], inputs.anchors
    for step in range(inputs.base_logits.shape[1]):
        bias = torch.nn.functional.linear(inputs.w1[previous], inputs.w2)
        previous = draw(inputs, inputs.base_logits[:, step] + bias, step, cache)
        tokens.append(previous)
    return torch.stack(tokens, 1)


def check(inputs: Inputs, case: Case, cache: DraftLogitsView) -> None:
    """Refuse to time a kernel that disagrees with its twin, or with `draft_sample`."""
    tokens = markov_sample(*inputs, cache, vocab_size=case.vocab_size)
    whole = cache_for(case._replace(num_shards=1))
    assert torch.equal(markov_sample(*inputs, whole, vocab_size=case.vocab_size), tokens)
    owned = whole.logits[cache.shard.shard_idx :: cache.shard.num_shards]
    assert torch.equal(cache.logits, owned), "a shard's rows differ from the whole cache's"
    previous = inputs.anchors
    for step in range(case.num_speculative_tokens):
        stored, base = whole.logits[:, step], inputs.base_logits[:, step]
        bias = markov_bias_reference(previous, inputs.w1, inputs.w2, dtype=case.dtype)
        expected = base + bias
        units = 2.0**-7 * (expected.float().abs() + bias.float().abs()) + 2.0**-20
        assert float(((stored.float() - expected.float()).abs() / units).max()) <= 1.0
        assert float((stored != expected).float().mean()) < 0.02, "rows differ from the twin's"
        previous = draw(inputs, stored, step, None)
        assert torch.equal(previous, tokens[:, step]), "tokens are not those of the rows"


def time_case(case: Case, bytes_per_us: float) -> dict[str, Any]:
    """One row of the table."""
    inputs, cache = inputs_of(case), cache_for(case)
    check(inputs, case, cache)
    loop(inputs, cache)
    loop_us = statistics.median(event_times_us(graph_of(lambda: loop(inputs, cache)).replay, 40))
    timing = measure(lambda: markov_sample(*inputs, cache, vocab_size=case.vocab_size), kernel)
    table_bytes = inputs.w2.nbytes * case.num_speculative_tokens
    moved_bytes = table_bytes + case.logits_bytes * (1 + 1 / case.num_shards)
    row = case.shape | {"rank": RANK} | timing.row(moved_bytes, bytes_per_us)
    return row | {"loop_us": round(loop_us, 1)}


def sweep_cases() -> None:
    """Microseconds of a call for every size of the programs of a step."""
    for case in (Case(num_reqs, 5, VOCAB_SIZE, BF16, 4) for num_reqs in (8, 64)):
        inputs, cache = inputs_of(case), cache_for(case)
        print(f"{HEADER}\n{case}")

        def run() -> None:
            markov_sample(*inputs, cache, vocab_size=VOCAB_SIZE)  # noqa: B023 - run at once

        shapes = {"ROWS": ((16,), (32,), (64,)), "COLUMNS": (64, 128)}
        sweep(run, kernel, None, sizes, shapes)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_script(__doc__, HEADER, CASES, time_case, sweep_cases)
