"""Tokens do not depend on the layout or the storage of the draft-logits cache."""

from dataclasses import replace

import pytest
import torch
from cache_layouts import batch_of_candidates, in_larger_buffers, in_layout
from verification_cases import emitted, random_requests

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import TensorError
from specreg.kernels import rejection_sample

LAYOUTS = list(DraftLogitsLayout)
METHODS = ["standard", "block"]
VOCAB_SIZE = 1500


def make_batch(dtype=torch.float32):
    requests = random_requests(24, VOCAB_SIZE, closeness=0.3, dtype=dtype)
    return batch_of_candidates(requests, list(range(24))[::-1])


def verify(batch, cache, method):
    return rejection_sample(*batch._replace(cache=cache), vocab_size=VOCAB_SIZE, method=method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_distributions_give_equal_tokens_in_every_layout(layout, method, dtype):
    batch, columns = make_batch(dtype)
    expected = verify(batch, batch.cache, method)
    view = in_layout(batch.cache, columns, layout)
    got = verify(batch, view, method)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert {len(tokens) for tokens in emitted(expected)} == {1, 2, 3, 4}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_may_be_a_slice_of_larger_arrays(layout, method):
    batch, columns = make_batch()
    view = in_layout(batch.cache, columns, layout)
    expected = verify(batch, view, method)
    got = verify(batch, in_larger_buffers(view), method)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_outside_of_what_the_cell_holds_is_no_draft(layout):
    batch, columns = make_batch()
    outside = next(token for token in range(VOCAB_SIZE) if token not in columns.tolist())
    drafts = torch.full_like(batch.draft_tokens, outside)
    view = in_layout(batch.cache, columns, layout)
    got = verify(batch._replace(draft_tokens=drafts), view, "standard")
    missing = verify(batch._replace(draft_tokens=drafts * 0 - 1), view, "standard")
    is_sampled = batch.temperature[batch.idx_mapping] > 0
    assert torch.equal(got.sampled[is_sampled], missing.sampled[is_sampled])


def test_caches_that_lack_what_their_layout_needs_are_refused():
    batch, columns = make_batch()
    reduced = in_layout(batch.cache, columns, DraftLogitsLayout.DRAFT_VOCAB)
    with pytest.raises(TensorError, match="lacks a tensor of its layout"):
        verify(batch, replace(reduced, target_to_draft=None), "standard")
    with pytest.raises(TensorError, match="target_to_draft"):
        verify(batch, replace(reduced, target_to_draft=reduced.target_to_draft[1:]), "standard")
    candidates = in_layout(batch.cache, columns, DraftLogitsLayout.TOP_K)
    with pytest.raises(TensorError, match=r"cache\)\.ids"):
        verify(batch, replace(candidates, ids=candidates.ids[..., 1:]), "standard")
    with pytest.raises(TensorError, match="1500"):
        verify(batch, replace(reduced, layout=DraftLogitsLayout.DENSE), "standard")
