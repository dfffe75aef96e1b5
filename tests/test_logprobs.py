"""Log probabilities survive packing, and are those of the whole distribution."""

from __future__ import annotations

import math

import pytest
import torch

from specreg import logprobs
from specreg.logprobs import LogprobsFormat, LogprobsQuery

V = 37


def logits_of(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (4 * torch.randn(num_rows, V, generator=generator)).to(dtype)


QUERIES = [
    LogprobsQuery(0),
    LogprobsQuery(5),
    LogprobsQuery(0, (30, 7, V - 1)),
    LogprobsQuery(2, (7, 7, 0, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query", QUERIES)
def test_what_is_asked_comes_back_whatever_others_ask(
    query: LogprobsQuery, dtype: torch.dtype
) -> None:
    layout = LogprobsFormat.of(QUERIES)
    assert layout == (5, 4)
    logits, tokens = logits_of(4, dtype), [5, 0, V - 1, 9]
    packed = layout.pack(logits, torch.tensor(tokens), query)
    assert packed.shape == (4, layout.width)
    expected = logits.double().log_softmax(1)
    for i, entry in enumerate(layout.unpack(packed, tokens, query)):
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(float(expected[i, tokens[i]]), abs=1e-5)
        best = expected[i].topk(query.num_top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [token for token, _ in entry.asked] == list(query.token_ids)
        values = [float(expected[i, token]) for token in query.token_ids]
        assert [value for _, value in entry.asked] == pytest.approx(values, abs=1e-5)


def test_only_emitted_positions_are_unpacked() -> None:
    layout, query = LogprobsFormat(1, 0), LogprobsQuery(1)
    packed = layout.pack(logits_of(4), torch.tensor([1, 2, 0, 0]), query)
    assert [entry.token_id for entry in layout.unpack(packed, [1, 2], query)] == [1, 2]
    assert layout.unpack(packed, [], query) == []


def test_a_row_is_packed_alike_in_one_piece_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, query = LogprobsFormat(3, 1), LogprobsQuery(3, (4,))
    arguments = (logits_of(7), torch.arange(7), query)
    whole = layout.pack(*arguments)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * V)
    assert torch.equal(layout.pack(*arguments), whole)


def test_nan_has_probability_0_and_leaves_the_others_a_distribution() -> None:
    logits = logits_of(1)
    logits[0, 3] = float("nan")
    query = LogprobsQuery(0, tuple(range(V)))
    layout = LogprobsFormat.of([query])
    assert layout is not None
    (entry,) = layout.unpack(layout.pack(logits, torch.tensor([3]), query), [3], query)
    assert entry.logprob == -math.inf
    assert sum(math.exp(value) for _, value in entry.asked) == pytest.approx(1, abs=1e-5)


def test_nobody_asking_needs_no_format() -> None:
    assert LogprobsFormat.of([]) is None
