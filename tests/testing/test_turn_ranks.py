"""Ranks that take turns trade values as a process group does, and fail together."""

from __future__ import annotations

import pytest
import torch

from specreg.errors import InternalError, RankFailedError
from specreg.testing.turn_ranks import TurnGroup, TurnRank


def run(size, body):
    """`body(tp)` of every rank, and the group."""
    group, results = TurnGroup(size), [None] * size

    def rank(index):
        results[index] = body(TurnRank(index, group))

    threads = [group.start(index, lambda i=index: rank(i)) for index in range(size)]
    for thread in threads:
        thread.join()
    return results, group


def test_collectives_give_what_a_process_group_gives():
    def body(tp):
        rows = torch.arange(3).view(3, 1) + 10 * tp.rank
        sizes = [1, 2, 0]
        return (
            tp.broadcast_bytes(b"plan" if tp.rank == 0 else None),
            tp.all_gather(torch.tensor([tp.rank])).flatten().tolist(),
            tp.all_to_all_rows(rows, sizes, [sizes[tp.rank]] * 3).flatten().tolist(),
            tp.smallest(5 - tp.rank),
            tp.all_agree(tp.rank < 2),
        )

    results, group = run(3, body)
    assert group.failure is None
    assert [r[0] for r in results] == [b"plan"] * 3
    assert [r[1] for r in results] == [[0, 1, 2]] * 3
    assert [r[2] for r in results] == [[0, 10, 20], [1, 2, 11, 12, 21, 22], []]
    assert [r[3:] for r in results] == [(3, False)] * 3


def test_the_first_error_is_kept_and_the_other_ranks_are_told():
    seen = []

    def body(tp):
        if tp.rank == 1:
            raise ValueError("rank 1 has had enough")
        try:
            tp.smallest(0)
        except RankFailedError as error:
            seen.append(str(error))
            raise

    _, group = run(3, body)
    assert isinstance(group.failure, ValueError)
    assert len(seen) == 2
    assert all("rank 1 has had enough" in line for line in seen)


def test_ranks_in_different_collectives_do_not_wait_for_ever():
    _, group = run(2, lambda tp: tp.smallest(0) if tp.rank else tp.all_gather(torch.zeros(1)))
    assert isinstance(group.failure, InternalError)
    with pytest.raises(InternalError, match="different collectives"):
        raise group.failure
