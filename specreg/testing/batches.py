"""Batches for speculators: prompts, decode rounds with rejections, chunks, padding rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specreg.speculator import ProposeInputs

__all__ = ["decode_batch", "permuted", "prompt_batch", "with_padding"]

PADDING = -1


def prompt_batch(
    prompts: Sequence[Sequence[int]],
    slots: Sequence[int],
    newest: Sequence[int],
    *,
    temperature: Tensor,
    seeds: Tensor,
    num_draft_tokens: int,
    starts: Sequence[int] | None = None,
    lookahead: Sequence[Sequence[int]] | None = None,
) -> ProposeInputs:
    """Whole prompts, or chunks of them, that the target has just read.

    Args:
        prompts: token ids of each request.
        slots: request state index of each; -1 is a padding row.
        newest: the token that was sampled behind each prompt; -1 where the prompt goes on and
            nothing was sampled.
        temperature: fp32 `[max_num_seqs]` by slot.
        seeds: int64 `[max_num_seqs]` by slot.
        num_draft_tokens: drafts wanted of each request that has a newest token.
        starts: position of each first token; None is 0.
        lookahead: prompt tokens behind each chunk, -1 padded to one length; None is none.
    """
    is_whole = [token >= 0 for token in newest]
    first = [0] * len(prompts) if starts is None else list(starts)
    return _packed(
        prompts,
        first,
        slots,
        num_sampled=[int(whole) for whole in is_whole],
        num_rejected=[0] * len(prompts),
        newest=newest,
        num_draft_tokens=[num_draft_tokens * whole for whole in is_whole],
        temperature=temperature,
        seeds=seeds,
        lookahead=lookahead,
    )


def decode_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    slots: Sequence[int],
    num_rejected: Sequence[int],
    newest: Sequence[int],
    *,
    temperature: Tensor,
    seeds: Tensor,
    num_draft_tokens: int,
    prefill_lookahead: int = 0,
) -> ProposeInputs:
    """Requests whose drafts have just been verified.

    Args:
        tokens: of each request the last emitted token and its drafts, as the target read them.
        starts: position of each first token.
        slots: request state index of each; -1 is a padding row.
        num_rejected: trailing drafts of each that were rejected.
        newest: the token that verification emitted last.
        temperature, seeds, num_draft_tokens: as in `prompt_batch`.
        prefill_lookahead: of the speculator; there are no prompt tokens ahead.
    """
    return _packed(
        tokens,
        starts,
        slots,
        num_sampled=[len(t) - r for t, r in zip(tokens, num_rejected, strict=True)],
        num_rejected=num_rejected,
        newest=newest,
        num_draft_tokens=[num_draft_tokens] * len(tokens),
        temperature=temperature,
        seeds=seeds,
        lookahead=[[PADDING] * prefill_lookahead] * len(tokens),
    )


def permuted(inputs: ProposeInputs, order: Sequence[int]) -> ProposeInputs:
    """The same batch with its rows in another order; `order[i]` is the old row of new row i."""
    index = torch.tensor(order, dtype=torch.int64, device=inputs.input_ids.device)
    offsets = inputs.query_start_loc
    tokens = [token for row in order for token in range(offsets[row], offsets[row + 1])]
    packed = torch.tensor(tokens, dtype=torch.int64, device=index.device)
    starts = [0]
    for row in order:
        starts.append(starts[-1] + offsets[row + 1] - offsets[row])

    def of_tokens(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[packed]

    return replace(
        inputs,
        input_ids=inputs.input_ids[packed],
        positions=inputs.positions[packed],
        query_start_loc=tuple(starts),
        idx_mapping=inputs.idx_mapping[index],
        sample_idx_mapping=inputs.sample_idx_mapping[index],
        num_sampled=inputs.num_sampled[index],
        num_rejected=inputs.num_rejected[index],
        last_sampled=inputs.last_sampled[index],
        next_prefill_tokens=inputs.next_prefill_tokens[:, index],
        num_draft_tokens=inputs.num_draft_tokens[index],
        hidden_states=of_tokens(inputs.hidden_states),
        aux_hidden_states=of_tokens(inputs.aux_hidden_states),
        token_history=None if inputs.token_history is None else inputs.token_history[index],
    )


def with_padding(inputs: ProposeInputs, before: Sequence[int]) -> tuple[ProposeInputs, list[int]]:
    """The same batch with padding rows of one token each, and where its own rows are in it.

    What a padding row holds is plausible, so that using it shows: token 1 at position 0, and, where
    states are given, those of the batch's first token.

    Args:
        inputs: a batch with at least one row.
        before: a padding row comes before each of these rows; the number of rows means behind all.
    """
    num_reqs, num_padding = inputs.num_reqs, len(before)
    order, own = [], []
    for row in range(num_reqs + 1):
        order += [num_reqs + i for i, place in enumerate(before) if place == row]
        if row < num_reqs:
            own.append(len(order))
            order.append(row)

    def rows(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((num_padding,), value)])

    def tokens(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat([tensor, tensor[:1].expand(num_padding, -1)])

    history, lookahead = inputs.token_history, inputs.next_prefill_tokens
    end = inputs.num_tokens
    padded = replace(
        inputs,
        input_ids=rows(inputs.input_ids, 1),
        positions=rows(inputs.positions, 0),
        query_start_loc=(*inputs.query_start_loc, *range(end + 1, end + 1 + num_padding)),
        idx_mapping=rows(inputs.idx_mapping, PADDING),
        sample_idx_mapping=rows(inputs.sample_idx_mapping, PADDING),
        num_sampled=rows(inputs.num_sampled, 1),
        num_rejected=rows(inputs.num_rejected, 0),
        last_sampled=rows(inputs.last_sampled, 1),
        next_prefill_tokens=torch.cat(
            [lookahead, lookahead.new_full((len(lookahead), num_padding), -1)], 1
        ),
        num_draft_tokens=rows(inputs.num_draft_tokens, 0),
        hidden_states=tokens(inputs.hidden_states),
        aux_hidden_states=tokens(inputs.aux_hidden_states),
        token_history=None
        if history is None
        else torch.cat([history, history[:1].expand(num_padding, -1)]),
    )
    return permuted(padded, order), own


def _packed(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    slots: Sequence[int],
    *,
    num_sampled: Sequence[int],
    num_rejected: Sequence[int],
    newest: Sequence[int],
    num_draft_tokens: Sequence[int],
    temperature: Tensor,
    seeds: Tensor,
    lookahead: Sequence[Sequence[int]] | None,
) -> ProposeInputs:
    device = temperature.device

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    offsets = [0]
    for row in tokens:
        offsets.append(offsets[-1] + len(row))
    positions = [s + i for s, row in zip(starts, tokens, strict=True) for i in range(len(row))]
    idx_mapping = ints(slots)
    ahead = torch.tensor(lookahead or [[]] * len(tokens), dtype=torch.int64).T
    return ProposeInputs(
        input_ids=ints([token for row in tokens for token in row]),
        positions=ints(positions),
        query_start_loc=tuple(offsets),
        idx_mapping=idx_mapping,
        sample_idx_mapping=torch.where(ints(num_draft_tokens) > 0, idx_mapping, PADDING),
        num_sampled=ints(num_sampled),
        num_rejected=ints(num_rejected),
        last_sampled=ints(newest),
        next_prefill_tokens=ahead.to(device),
        num_draft_tokens=ints(num_draft_tokens),
        temperature=temperature,
        seeds=seeds,
    )
