"""Every method and layout of `rejection_sample`, and `cell_statistics`, on a GPU."""

from dataclasses import replace

import pytest
import torch
from kernels.cache_layouts import in_larger_buffers, in_layout
from real_batches import BF16, FP32, LARGE, agree, real_batch, verify

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels import cell_statistics, rejection_sample
from specreg.kernels.cell_statistics.reference import cell_statistics_reference
from specreg.kernels.common.view import CELL_BARE
from specreg.kernels.rejection_sample.rows import reference as rows_reference
from specreg.ownership import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

LAYOUTS = list(DraftLogitsLayout)
OTHERS = ["block", "synthetic"]


@pytest.fixture(autouse=True)
def large_chunks(monkeypatch):
    """The twin works on few chunks, as a GPU likes it."""
    monkeypatch.setattr(rows_reference, "CHUNK_ELEMENTS", 2**26)


def candidate_batch(num_reqs, num_drafts, vocab_size, num_candidates=20, dtype=BF16):
    """Drafts from a few columns that the target favours, the same in every cell."""
    batch = real_batch(num_reqs, num_drafts, vocab_size, dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(3)
    columns = torch.randperm(vocab_size, device="cuda", generator=generator)[:num_candidates]
    target = batch.target_logits.clone()
    target[:, columns] += 12
    narrow = torch.full_like(batch.cache.logits, -torch.inf)
    narrow[..., columns] = (target.view(num_reqs, -1, vocab_size)[:, :-1, columns]).to(narrow)
    rows = batch.idx_mapping // batch.cache.shard.num_shards
    stored = torch.full_like(batch.cache.logits, -torch.inf)
    stored[rows] = narrow
    noise = torch.randn(*stored.shape[:2], num_candidates, device="cuda", generator=generator)
    stored[..., columns] += noise.to(stored)
    temperature = batch.cache.temperature
    logsumexp = (stored.float() / temperature[..., None]).logsumexp(-1)
    drawn = torch.distributions.Categorical(logits=stored.float() / temperature[..., None]).sample()
    view = replace(batch.cache, logits=stored, logsumexp=logsumexp)
    return batch._replace(target_logits=target, draft_tokens=drawn[rows], cache=view), columns


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("method", OTHERS)
def test_kernel_and_twin_agree_at_a_real_size(method, dtype):
    batch = real_batch(32, dtype=dtype)
    output = agree(batch, LARGE, method)
    assert 1.5 < output.num_sampled.float().mean() < 7
    agree(batch._replace(cache=None), LARGE, method)


@pytest.mark.parametrize("vocab_size", [1, 513, 49_152, 151_936])
@pytest.mark.parametrize("method", OTHERS)
def test_kernel_and_twin_agree_at_odd_sizes(method, vocab_size):
    batch = real_batch(9, 3, vocab_size, draft_dtype=FP32, shard=Shard())
    temperature = batch.temperature.clone()
    temperature[::4] = 0.0
    drafts = batch.draft_tokens.clone()
    drafts[1, 0], drafts[2, -1] = -1, vocab_size
    state, drawn_at = batch.cache.state.clone(), batch.cache.temperature.clone()
    state[batch.idx_mapping[3], 1] = 0
    drawn_at[batch.idx_mapping[4], 1] = 0.0
    idx_mapping = batch.idx_mapping.clone()
    idx_mapping[5] = -1
    mixed = batch._replace(
        temperature=temperature,
        draft_tokens=drafts,
        idx_mapping=idx_mapping,
        cache=replace(batch.cache, state=state, temperature=drawn_at),
    )
    agree(mixed, vocab_size, method)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_the_twin_and_with_each_other(layout, method):
    batch, columns = candidate_batch(16, 5, LARGE)
    expected = verify(batch, method)
    view = in_layout(batch.cache, columns, layout)
    got = agree(batch._replace(cache=view), LARGE, method)
    assert torch.equal(got.num_sampled, expected.num_sampled)
    assert torch.equal(got.sampled, expected.sampled)
    assert len(set(got.num_sampled.tolist())) > 1
    embedded = verify(batch._replace(cache=in_larger_buffers(view)), method)
    assert torch.equal(embedded.sampled, got.sampled)


def test_values_that_are_no_numbers_agree_with_the_twin():
    batch = real_batch(8, 3, 10_000, shard=Shard())
    target = batch.target_logits.clone()
    target[0], target[5], target[9] = float("nan"), float("-inf"), float("inf")
    target[16:20, ::7] = float("nan")
    target[24:28, 100:] = float("-inf")
    for method in OTHERS:
        output = agree(batch._replace(target_logits=target), 10_000, method)
        assert output.num_nans.tolist() == [1, 1, 0, 0, 4, 0, 0, 0]
        assert ((output.sampled >= -1) & (output.sampled < 10_000)).all()


@pytest.mark.parametrize("method", ["standard", *OTHERS])
def test_tokens_do_not_depend_on_the_batch_or_on_how_tensors_are_aligned(method):
    batch = real_batch(130, 3, 10_000)  # in three parts
    together = verify(batch, method)
    shifted = torch.empty(batch.target_logits.numel() + 1, dtype=BF16, device="cuda")[1:]
    shifted = shifted.view_as(batch.target_logits).copy_(batch.target_logits)
    for b in (0, 64, 129):
        rows = slice(4 * b, 4 * b + 4)
        for target in (batch.target_logits, shifted):
            alone = batch._replace(
                target_logits=target[rows],
                draft_tokens=batch.draft_tokens[b : b + 1],
                idx_mapping=batch.idx_mapping[b : b + 1],
                cu_num_logits=batch.cu_num_logits[:2],
                positions=batch.positions[b : b + 1],
            )
            assert torch.equal(verify(alone, method).sampled[0], together.sampled[b])


@pytest.mark.parametrize("method", OTHERS)
def test_targets_and_caches_of_more_than_2_to_the_31_elements_are_addressed_with_64_bits(method):
    vocab_size, num_drafts, last_slot = 262_144, 7, 1_399
    small = real_batch(1, num_drafts, vocab_size, shard=Shard())
    num_rows, first = 8_208, 8_200
    target = torch.empty(num_rows, vocab_size, dtype=BF16, device="cuda")
    target[first:] = small.target_logits
    # Steps first: a step's offset alone passes 2^31.
    cells = torch.empty(num_drafts, last_slot + 1, vocab_size, dtype=BF16, device="cuda")
    cells[:, last_slot] = small.cache.logits[0]
    assert (num_drafts - 1) * (last_slot + 1) * vocab_size > 2**31

    def by_slot(values):
        wide = values.new_zeros(last_slot + 1, *values.shape[1:])
        wide[last_slot] = values[0]
        return wide

    view = small.cache
    cache = replace(
        view,
        logits=cells.transpose(0, 1),
        temperature=by_slot(view.temperature),
        logsumexp=by_slot(view.logsumexp),
        state=by_slot(view.state),
    )
    large = small._replace(
        target_logits=target,
        idx_mapping=torch.tensor([last_slot], device="cuda"),
        cu_num_logits=torch.tensor([first, num_rows], device="cuda"),
        temperature=by_slot(small.temperature),
        seeds=by_slot(small.seeds),
        cache=cache,
    )
    expected, got = verify(small, method), verify(large, method)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    cache.logsumexp.fill_(float("nan"))
    cache.state.fill_(CELL_BARE)
    cell_statistics(cache, large.idx_mapping)
    assert torch.allclose(cache.logsumexp[last_slot], view.logsumexp[0], atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(expected, verify(large, method), strict=True))


@pytest.mark.parametrize("method", OTHERS)
def test_nothing_synchronises_and_a_captured_graph_replays_on_new_inputs(method):
    first, second = (real_batch(8, 3, 10_000, seed=seed) for seed in (0, 1))
    expected = verify(second, method)
    verify(first, method)
    cell_statistics(first.cache, first.idx_mapping)
    torch.cuda.synchronize()
    rates = torch.linspace(0.9, 0.3, 3, device="cuda") if method == "synthetic" else None

    def run():
        cell_statistics(first.cache, first.idx_mapping)
        return rejection_sample(*first, vocab_size=10_000, method=method, acceptance_rates=rates)

    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for static, fresh in zip(first[:-1], second[:-1], strict=True):
        static.copy_(fresh)
    for name in ("logits", "temperature", "logsumexp", "state"):
        getattr(first.cache, name).copy_(getattr(second.cache, name))
    first.cache.state.fill_(CELL_BARE)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(output, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_bare_cells_agree_with_the_twin(layout):
    batch, columns = candidate_batch(16, 5, 151_936)
    view = in_layout(batch.cache, columns, layout)
    views = [
        replace(view, logsumexp=torch.zeros_like(view.logsumexp), state=view.state * 0 + CELL_BARE)
        for _ in range(2)
    ]
    cell_statistics(views[0], batch.idx_mapping)
    cell_statistics_reference(views[1], batch.idx_mapping)
    assert torch.allclose(views[0].logsumexp, views[1].logsumexp, atol=1e-5)
    assert torch.equal(views[0].state, views[1].state)
    dense = real_batch(16, 5, LARGE)
    bare = replace(
        dense.cache,
        logsumexp=torch.zeros_like(dense.cache.logsumexp),
        state=dense.cache.state * 0 + CELL_BARE,
    )
    cell_statistics(bare, dense.idx_mapping)
    assert torch.equal(verify(dense._replace(cache=bare)).sampled, verify(dense).sampled)


@pytest.mark.parametrize("method", ["standard", *OTHERS])
def test_peak_memory_does_not_grow_from_64_to_256_requests(method):
    peaks = []
    for num_reqs in (64, 256):
        batch = real_batch(num_reqs, 3, 49_152)
        verify(batch, method)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = verify(batch, method)
        outputs = sum(-(-tensor.nbytes // 512) * 512 for tensor in output)
        peaks.append(torch.cuda.max_memory_allocated() - before - outputs)
        del batch, output
    assert peaks[1] <= peaks[0] + 512
