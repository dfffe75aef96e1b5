"""What a block drafter keeps between rounds, and what it must not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import MAX_MODEL_LEN, GoldenCase, Replay
from torch import Tensor

from specreg.speculator import ProposeInputs
from specreg.testing.batches import decode_batch, prompt_batch

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SLOT, OTHER_SLOT, K = 1, 2, 4


def states(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 2 * 64, generator=generator)


class Driver:
    """A loaded drafter of two layers, one of them sliding, that is fed whatever a test likes."""

    def __init__(self, folder: Path, case: str = "dflash-3", **keys: Any) -> None:
        folder.mkdir()
        self.replay = Replay(
            GoldenCase(case), {"method": "dflash", **keys}, folder, form="checkpoint_hf"
        )
        self.speculator: Any = self.replay.speculator
        self.common: dict[str, Any] = {
            "temperature": self.replay.temperature,
            "seeds": self.replay.seeds,
        }

    def prompt(self, features: Tensor, newest: int, start: int = 0, slot: int = SLOT) -> Tensor:
        wanted = K if newest >= 0 else 0
        batch = prompt_batch(
            [[7] * len(features)],
            [slot],
            [newest],
            starts=[start],
            num_draft_tokens=wanted,
            **self.common,
        )
        return self.propose(replace(batch, aux_hidden_states=features))

    def verified(
        self, features: Tensor, newest: int, start: int, num_rejected: int, wanted: int = K
    ) -> Tensor:
        tokens = [[7] * len(features)]
        batch = decode_batch(
            tokens,
            [start],
            [SLOT],
            [num_rejected],
            [newest],
            num_draft_tokens=wanted,
            **self.common,
        )
        return self.propose(replace(batch, aux_hidden_states=features))

    def propose(self, inputs: ProposeInputs) -> Tensor:
        """Logits of the proposal of slot 1, `[K, vocab]`; empty where there is none."""
        self.tokens = self.replay._propose(inputs)
        return self.tokens.logits

    @property
    def pools(self) -> list[Tensor]:
        pool = self.speculator.kv._pool
        return [*pool.keys, *pool.values]

    def cells(self, slot: int = SLOT) -> list[Tensor]:
        """A layer's keys or values of a slot by position, in memory of their own."""
        table = self.speculator.kv._pool.block_table[slot].long()
        return [pool[table].flatten(0, 1) for pool in self.pools]

    def fill(self, first: int, value: float, slot: int = SLOT) -> None:
        """Overwrite what the slot holds from a position on."""
        pool = self.speculator.kv._pool
        for position in range(first, MAX_MODEL_LEN):
            block = pool.block_table[slot, position // pool.block_size]
            for tensor in self.pools:
                tensor[block, position % pool.block_size] = value


@pytest.mark.parametrize(("name", "form"), [("dflash-1", "checkpoint"), ("xpress-1", "checkpoint")])
def test_block_states_and_context_keys_and_values_are_the_expected_ones(
    name: str, form: str, tmp_path: Path
) -> None:
    case = GoldenCase(name)
    replay = Replay(case, {"method": "dflash"}, tmp_path, form=form)
    speculator: Any = replay.speculator
    seen: list[Tensor] = []
    propose_block = speculator.propose_block
    speculator.propose_block = lambda hidden, *rest: (
        seen.append(hidden[0]) or propose_block(hidden, *rest)
    )
    pool = speculator.kv._pool
    for index, _ in replay.rounds(chunk=4):
        torch.testing.assert_close(seen[-1], case.tensor(index, "block_hidden"), **CLOSE)
        if name != "dflash-1":
            continue
        length = len(case.tensor(index, "committed_ids"))
        table = pool.block_table[SLOT].long()
        for expected, stored in (("context_k", pool.keys), ("context_v", pool.values)):
            found = torch.stack([tensor[table].flatten(0, 1)[:length] for tensor in stored])
            torch.testing.assert_close(found, case.tensor(index, expected), **CLOSE)


def test_fewer_drafts_see_fewer_mask_rows(tmp_path: Path) -> None:
    case = GoldenCase("dflash-1")
    num_rows = case.facts["short_block_rows"]
    keys = {"method": "dflash", "num_speculative_tokens": num_rows - 1}
    for index, proposed in Replay(case, keys, tmp_path).rounds():
        expected = case.tensor(index, "short_draft_logits")
        torch.testing.assert_close(proposed.logits, expected, **CLOSE)
        assert proposed.tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("num_accepted", range(K + 1))
def test_after_any_rejection_a_proposal_is_that_of_a_context_built_anew(
    num_accepted: int, tmp_path: Path
) -> None:
    prompt, row = states(9, seed=1), states(K + 1, seed=2)
    valid = row[: num_accepted + 1]
    lived, fresh = Driver(tmp_path / "lived"), Driver(tmp_path / "fresh")
    lived.prompt(prompt, 3)
    after = lived.verified(row, 5, start=9, num_rejected=K - num_accepted)
    anew = fresh.prompt(torch.cat((prompt, valid)), 5)
    torch.testing.assert_close(after, anew, **CLOSE)


def test_keys_of_a_block_do_not_survive_into_the_next_round(tmp_path: Path) -> None:
    prompt, row = states(9, seed=1), states(K + 1, seed=2)
    clean, soiled = Driver(tmp_path / "clean"), Driver(tmp_path / "soiled")
    for driver in (clean, soiled):
        driver.prompt(prompt, 3)
    soiled.fill(9, 1e3)
    assert torch.equal(
        clean.verified(row, 5, start=9, num_rejected=3),
        soiled.verified(row, 5, start=9, num_rejected=3),
    )


def test_rejected_rows_write_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "draft")
    driver.prompt(states(9, seed=1), 3)
    before = driver.cells()
    driver.verified(states(K + 1, seed=2), 5, start=9, num_rejected=3, wanted=0)
    for old, new in zip(before, driver.cells(), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [9, 10]


def test_a_chunk_of_a_prompt_writes_its_context_and_drafts_nothing(tmp_path: Path) -> None:
    features = states(9, seed=1)
    whole, chunked = Driver(tmp_path / "whole"), Driver(tmp_path / "chunked")
    expected = whole.prompt(features, 3)
    assert chunked.prompt(features[:4], -1).numel() == 0
    assert chunked.tokens.tokens == [-1] * K
    assert all((cells[4:] == 0).all() for cells in chunked.cells())
    torch.testing.assert_close(chunked.prompt(features[4:], 3, start=4), expected, **CLOSE)


def test_requests_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    mine, others = states(9, seed=1), states(5, seed=3)
    alone, together = Driver(tmp_path / "alone"), Driver(tmp_path / "together")
    expected = alone.prompt(mine, 3)
    batch = prompt_batch(
        [[7] * 5, [7] * 9], [OTHER_SLOT, SLOT], [8, 3], num_draft_tokens=K, **together.common
    )
    found = together.propose(replace(batch, aux_hidden_states=torch.cat((others, mine))))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert all((cells == 0).all() for cells in together.cells(slot=0))


@pytest.mark.parametrize("room", range(K + 2))
def test_near_the_end_of_the_positions_drafts_end(room: int, tmp_path: Path) -> None:
    """Rows beyond the last position are inert: the block is as if it had fewer mask rows."""
    length = MAX_MODEL_LEN - 1 - room  # the anchor's position
    features = states(length, seed=4)
    driver = Driver(tmp_path / "draft")
    logits = driver.prompt(features, 3)
    num_drafts = min(room, K)
    assert [token >= 0 for token in driver.tokens.tokens] == [i < num_drafts for i in range(K)]
    if 0 < num_drafts < K:
        short = Driver(tmp_path / "short", num_speculative_tokens=num_drafts)
        expected = short.prompt(features, 3)
        torch.testing.assert_close(logits[:num_drafts], expected, **CLOSE)
    assert all(not cells[MAX_MODEL_LEN:].any() for cells in driver.cells(slot=OTHER_SLOT))


def test_a_request_that_wants_no_drafts_keeps_its_context_up_to_date(tmp_path: Path) -> None:
    prompt, rows = states(9, seed=1), states(3, seed=2)
    lived, fresh = Driver(tmp_path / "lived"), Driver(tmp_path / "fresh")
    lived.prompt(prompt, 3)
    lived.verified(rows[:1], 4, start=9, num_rejected=0, wanted=0)
    lived.verified(rows[1:2], 4, start=10, num_rejected=0, wanted=0)
    after = lived.verified(rows[2:], 5, start=11, num_rejected=0)
    torch.testing.assert_close(after, fresh.prompt(torch.cat((prompt, rows)), 5), **CLOSE)
