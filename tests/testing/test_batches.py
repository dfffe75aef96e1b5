"""Batches as a host builds them, padded and in other orders."""

from __future__ import annotations

import torch

from specreg.testing import decode_batch, permuted, prompt_batch, with_padding

SLOTS = {"temperature": torch.zeros(6), "seeds": torch.arange(6)}


def prompts():
    return prompt_batch(
        [[3, 4, 5], [6, 7], [8]],
        [4, 1, 0],
        [9, -1, 2],
        starts=[0, 10, 5],
        lookahead=[[-1], [7], [-1]],
        num_draft_tokens=3,
        **SLOTS,
    )


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing():
    batch = prompts()
    assert batch.query_start_loc == (0, 3, 5, 6)
    assert batch.positions.tolist() == [0, 1, 2, 10, 11, 5]
    assert batch.sample_idx_mapping.tolist() == [4, -1, 0]
    assert batch.num_sampled.tolist() == [1, 0, 1]
    assert batch.num_draft_tokens.tolist() == [3, 0, 3]
    assert batch.next_prefill_tokens.tolist() == [[-1, 7, -1]]


def test_a_decode_round_emits_its_accepted_drafts_and_one_token_more():
    batch = decode_batch(
        [[3, 4, 5, 6], [7, 8]], [4, 9], [2, 5], [2, 0], [1, 1], num_draft_tokens=3, **SLOTS
    )
    assert batch.num_sampled.tolist() == [2, 2]
    assert batch.num_rejected.tolist() == [2, 0]
    assert batch.sample_idx_mapping.tolist() == [2, 5]


def test_rows_move_with_everything_that_belongs_to_them_and_back():
    batch = prompts()
    batch.hidden_states = torch.arange(6.0).view(6, 1)
    batch.token_history = torch.arange(3).view(3, 1)
    turned = permuted(batch, [2, 0, 1])
    assert turned.input_ids.tolist() == [8, 3, 4, 5, 6, 7]
    assert turned.query_start_loc == (0, 1, 4, 6)
    assert turned.idx_mapping.tolist() == [0, 4, 1]
    assert turned.token_history.flatten().tolist() == [2, 0, 1]
    back = permuted(turned, [1, 2, 0])
    for field, value in vars(batch).items():
        other = getattr(back, field)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_padding_rows_hold_one_token_and_the_own_rows_are_found():
    padded, own = with_padding(prompts(), [0, 2, 3])
    assert padded.idx_mapping.tolist() == [-1, 4, 1, -1, 0, -1]
    assert padded.query_start_loc == (0, 1, 4, 6, 7, 8, 9)
    assert own == [1, 2, 4]
    assert padded.input_ids[[1, 2, 3]].tolist() == [3, 4, 5]
    assert padded.num_draft_tokens[[0, 3, 5]].tolist() == [0, 0, 0]
