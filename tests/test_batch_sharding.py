"""Logits reach their owners and outputs come back, over gloo processes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks

from specreg.batch_sharding import BatchSharder, check_agreement
from specreg.errors import RankDivergenceError
from specreg.ownership import Shard, cdiv
from specreg.runtime.tensor_parallel import TensorParallel

K = 2


class Case(NamedTuple):
    """A batch: slots, logits rows a request, real vocabulary columns."""

    idx_mapping: list[int]
    num_logits: list[int]
    vocab_size: int


CASES = [
    Case([3, 0, 6, 1, 4], [1, 3, 2, 1, 3], 10),
    Case([0, 12, 24], [2, 1, 3], 7),  # rank 0 owns all of them at tp 2, 3 and 4
    Case([5], [1], 3),  # one request, fewer columns than ranks at tp 4
    Case([2, -1, 7, 1], [3, 0, 0, 1], 13),  # a padding row and a request in mid-prefill
    Case([4, 1], [0, 0], 5),  # nothing is sampled at all
    Case([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 1, 2, 3, 1], 33),
]


def dense_logits(case: Case) -> torch.Tensor:
    """Every element distinct, so that a misplaced one shows."""
    num_rows = sum(case.num_logits)
    return torch.arange(num_rows * case.vocab_size).view(num_rows, case.vocab_size)


def vocabulary_slice(logits: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """This rank's columns, padded to the same width on every rank."""
    width = cdiv(logits.shape[1], tp.size)
    padded = torch.nn.functional.pad(logits, (0, width * tp.size - logits.shape[1]), value=-1)
    return padded[:, tp.rank * width : (tp.rank + 1) * width]


def exchange_and_gather(tp: TensorParallel) -> dict[str, object]:
    sharder = BatchSharder(Shard(tp.size, tp.rank), tp, vocab_size=0)
    outputs = []
    for case in CASES:
        idx_mapping = torch.tensor(case.idx_mapping)
        cu_num_logits = torch.tensor([0, *case.num_logits]).cumsum(0)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sharder.vocab_size = case.vocab_size
            plan = sharder.plan(idx_mapping, cu_num_logits)
            logits = dense_logits(case).to(dtype)
            local = sharder.exchange_logits(vocabulary_slice(logits, tp)[plan.order], plan)
            owned = [b for b, slot in enumerate(case.idx_mapping) if slot % tp.size == tp.rank]
            owned = [b for b in owned if case.idx_mapping[b] >= 0]
            rows = [torch.arange(cu_num_logits[b], cu_num_logits[b + 1]) for b in owned]
            expected = logits[torch.cat(rows)] if rows else logits[:0]
            torch.testing.assert_close(local, expected, rtol=0, atol=0)
            assert plan.local_idx_mapping.tolist() == [case.idx_mapping[b] for b in owned]
        # Each owner reports what only it knows: token ids made of its requests' slots.
        slots = plan.local_idx_mapping
        sampled = slots.unsqueeze(1) * 10 + torch.arange(K + 1)
        proposal_hash = torch.tensor(-(2**62) - 5)
        extra = slots.unsqueeze(1) + torch.tensor([2**40, -(2**40)])
        gathered = sharder.gather_outputs(sampled, slots + 1, slots + 2, plan, proposal_hash, extra)
        bare = sharder.gather_outputs(sampled, slots + 1, slots + 2, plan, proposal_hash)
        assert bare.extra.shape == (len(case.idx_mapping), 0)
        torch.testing.assert_close(bare.sampled, gathered.sampled)
        outputs.append([tensor.tolist() for tensor in gathered])
    return {"outputs": outputs, "counts": dict(tp.counts)}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, object]]:
    return run_ranks(request.param, exchange_and_gather)


def test_owners_get_whole_rows_and_every_rank_gets_all_outputs_in_batch_order(
    ranks: list[dict[str, object]],
) -> None:
    for result in ranks:
        for case, output in zip(CASES, result["outputs"], strict=True):  # type: ignore[call-overload]
            sampled, num_sampled, num_nans, extra, hashes = output
            live = [slot >= 0 for slot in case.idx_mapping]
            assert sampled == [
                [slot * 10 + i for i in range(K + 1)] if is_live else [-1] * (K + 1)
                for slot, is_live in zip(case.idx_mapping, live, strict=True)
            ]
            assert num_sampled == [s + 1 if s >= 0 else 0 for s in case.idx_mapping]
            assert num_nans == [s + 2 if s >= 0 else 0 for s in case.idx_mapping]
            assert extra == [[s + 2**40, s - 2**40] if s >= 0 else [0, 0] for s in case.idx_mapping]
            assert hashes == [[-(2**62) - 5, 0]] * len(ranks)


def test_every_rank_joins_the_same_collectives_whatever_it_owns(
    ranks: list[dict[str, object]],
) -> None:
    counts = [result["counts"] for result in ranks]
    assert counts == counts[:1] * len(ranks)
    if len(ranks) > 1:
        assert counts[0] == {"all_to_all": 3 * len(CASES), "all_gather": 2 * len(CASES)}


def test_equal_proposals_agree() -> None:
    check_agreement([[5, 6]] * 3, step=3, proposal_step=2)


def test_ranks_that_proposed_something_else_are_named_with_the_step() -> None:
    with pytest.raises(RankDivergenceError, match=r"proposal of step 7; ranks \[1, 3\] differ"):
        check_agreement([[5, 0], [6, 0], [5, 0], [-5, 0]], step=9, proposal_step=7)


def test_ranks_that_sampled_something_else_are_told_apart_from_those_that_proposed_it() -> None:
    with pytest.raises(RankDivergenceError, match=r"sampled different.*\n.*step 9; ranks \[1\]"):
        check_agreement([[5, 1], [5, 2]], step=9, proposal_step=7)
