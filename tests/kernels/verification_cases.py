"""Requests to verify, laid out in batches over slots and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.op import draft_sample
from specreg.ownership import Shard, rows_per_rank


@dataclass(frozen=True)
class Request:
    """One request of a round.

    Attributes:
        target: `[num_rows, width]` target logits: a row a draft and one more; none in mid-prefill.
        draft: `[num_rows - 1, vocab_size]` draft logits.
        temperature, seed, position: as the ops take them.
        drafted_at: temperature of the draft; None means the same.
    """

    target: Tensor
    draft: Tensor
    temperature: float = 1.0
    seed: int = 0
    position: int = 10
    drafted_at: float | None = None


class Batch(NamedTuple):
    """The arguments of `rejection_sample`."""

    target_logits: Tensor
    draft_tokens: Tensor
    idx_mapping: Tensor
    cu_num_logits: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor
    cache: DraftLogitsView | None


def random_requests(
    num_reqs: int,
    vocab_size: int,
    num_drafts: int = 3,
    *,
    closeness: float = 0.5,
    scale: float = 3.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Request]:
    """Requests whose draft logits are the target's with noise; each fourth has temperature 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, vocab_size, generator=generator)

    requests = []
    for i in range(num_reqs):
        target = normal(num_drafts + 1) * scale
        draft = target[:-1] + normal(num_drafts) * closeness
        seed_of_request = int(torch.randint(-(2**62), 2**62, (), generator=generator))
        temperature = 0.0 if i % 4 == 3 else 0.5 + 0.25 * i
        requests.append(
            Request(target.to(dtype), draft.to(dtype), temperature, seed_of_request, 10 + 7 * i)
        )
    return requests


def lay_out(
    requests: list[Request | None],
    slots: list[int],
    *,
    num_drafts: int = 3,
    max_num_seqs: int | None = None,
    shard: Shard | None = None,
    device: str = "cpu",
    with_cache: bool = True,
) -> Batch:
    """A batch of `requests` at `slots`, after drafting; None beside a slot of -1 is padding."""
    shard = shard or Shard()
    max_num_seqs = max([*slots, 0]) + 1 if max_num_seqs is None else max_num_seqs
    some = next(request for request in requests if request is not None)
    width, vocab_size = some.target.shape[1], some.draft.shape[1]
    cache = make_cache(max_num_seqs, num_drafts, vocab_size, some.draft.dtype, shard, device)
    temperature, drafted_at = torch.ones(max_num_seqs), torch.ones(max_num_seqs)
    seeds = torch.zeros(max_num_seqs, dtype=torch.int64)
    for request, slot in zip(requests, slots, strict=True):
        if request is not None:
            temperature[slot], seeds[slot] = request.temperature, request.seed
            at = request.drafted_at
            drafted_at[slot] = request.temperature if at is None else at

    rows, drafts, positions, cu = [some.target[:0]], [some.draft[:0]], [], [0]
    cells: list[tuple[int, int]] = []
    for b, request in enumerate(requests):
        count = 0 if request is None else len(request.target)
        positions.append(0 if request is None else request.position)
        cu.append(cu[-1] + count)
        if request is not None:
            rows.append(request.target)
            drafts.append(request.draft[: max(count - 1, 0)])
            cells += [(b, step) for step in range(count - 1)]
    of_rows, steps = torch.tensor(cells, dtype=torch.int64).view(-1, 2).T.contiguous()
    ids = draft_sample(
        torch.cat(drafts).to(device),
        torch.tensor(slots, dtype=torch.int64)[of_rows].to(device),
        steps.to(device),
        (torch.tensor(positions, dtype=torch.int64)[of_rows] + steps).to(device),
        drafted_at.to(device),
        seeds.to(device),
        cache if with_cache else None,
        vocab_size=vocab_size,
    )
    draft_tokens = torch.full((len(slots), num_drafts), -1)
    draft_tokens[of_rows, steps] = ids.cpu()
    return Batch(
        target_logits=torch.cat(rows).reshape(-1, width).to(device),
        draft_tokens=draft_tokens.to(device),
        idx_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        cu_num_logits=torch.tensor(cu, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        temperature=temperature.to(device),
        seeds=seeds.to(device),
        cache=cache if with_cache else None,
    )


def make_cache(
    max_num_seqs: int,
    num_drafts: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    shard: Shard | None = None,
    device: str = "cpu",
) -> DraftLogitsView:
    """An empty cache whose logits would accept any draft."""
    shard = shard or Shard()
    rows = rows_per_rank(max_num_seqs, shard.num_shards)
    logits = torch.full((rows, num_drafts, vocab_size), -50.0, dtype=dtype, device=device)
    return DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size).view()


def emitted(output: tuple[Tensor, Tensor, Tensor]) -> list[list[int]]:
    """The tokens that each request emits."""
    sampled, num_sampled, _ = output
    rows = zip(sampled.tolist(), num_sampled.tolist(), strict=True)
    return [row[:count] for row, count in rows]


def with_draft(batch: Batch, b: int, step: int, token: int) -> Batch:
    """The batch with one draft replaced."""
    drafts = batch.draft_tokens.clone()
    drafts[b, step] = token
    return batch._replace(draft_tokens=drafts)


def with_target(batch: Batch, row: int, logits: Tensor) -> Batch:
    """The batch with one row of target logits replaced."""
    target = batch.target_logits.clone()
    target[row] = logits.to(target)
    return batch._replace(target_logits=target)


def with_cell(view: DraftLogitsView, row: int, step: int, **values: float) -> DraftLogitsView:
    """The cache with one cell's temperature, logsumexp or state replaced."""
    changed = {}
    for name, value in values.items():
        changed[name] = getattr(view, name).clone()
        changed[name][row, step] = value
    return replace(view, **changed)
