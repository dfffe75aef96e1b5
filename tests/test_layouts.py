"""Every layout, from its choice in the plan to the tokens that are emitted, with toy drafters."""

from types import SimpleNamespace

import pytest
import torch
from toy_plugins import ToyPlugin, capabilities, spec

from specreg.capabilities import DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.errors import TensorError
from specreg.kernels import rejection_sample
from specreg.ownership import Shard
from specreg.policy import finalize, resolve
from specreg.registry import Registry
from specreg.rejection_sampler import RejectionSampler, VerifyInputs
from specreg.speculator import DraftOutput, SpeculatorBase, SpeculatorContext

DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout
VOCAB_SIZE, K, MAX_NUM_SEQS = 257, 3, 6
TARGET_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(9))[:60]
LAYOUTS = {"plain": {DENSE}, "reduced": {DENSE, DRAFT_VOCAB}, "candidates": {DENSE, TOP_K}}
SMALLEST = {"plain": DENSE, "reduced": DRAFT_VOCAB, "candidates": TOP_K}
SPECS = (
    spec("plain"),
    spec(
        "reduced",
        capabilities=capabilities(layouts=frozenset(LAYOUTS["reduced"]), draft_vocab_size=60),
    ),
    spec(
        "candidates",
        capabilities=capabilities(layouts=frozenset(LAYOUTS["candidates"]), num_candidates=8),
    ),
)
REGISTRY = Registry.from_plugins([ToyPlugin(*SPECS)])
CASES = [(method, layout) for method, layouts in LAYOUTS.items() for layout in sorted(layouts)]


class Toy(SpeculatorBase):
    """Draws from random logits that depend on the slot and the step alone."""

    def load_model(self, target):
        if self.spec.name == "reduced":
            self.target_ids = TARGET_IDS.int()  # as checkpoints may hold them

    def prepare(self, inputs):
        self.inputs = inputs

    def draft(self, num_reqs_padded):
        slots = self.inputs.sample_idx_mapping
        tokens = []
        for step in range(K):
            rows = [logits_of(self.spec.name, int(slot), step) for slot in slots]
            logits, positions = torch.stack(rows), torch.full_like(slots, 20 + step)
            if self.spec.name == "candidates":
                scores, ids = logits.topk(8, -1)
                tokens.append(self.sampler.sample_candidates(ids, scores, step, positions))
            else:
                tokens.append(self.sampler.sample(logits, step, positions))
        return DraftOutput(torch.stack(tokens, 1))


def logits_of(method, slot, step):
    generator = torch.Generator().manual_seed(100 * max(slot, 0) + step)
    width = 60 if method == "reduced" else VOCAB_SIZE
    return torch.randn(width, generator=generator).mul(2).to(torch.bfloat16).float()


class Target(SimpleNamespace):
    def compute_logits_local(self, hidden_states):
        raise AssertionError("planning does not compute")


def load(method, layout="auto", *, tp=1, rank=0, max_num_seqs=MAX_NUM_SEQS):
    """A loaded speculator with its final plan and a sampler, as a host makes them."""
    config = EngineConfig.parse(
        {
            "speculative": {
                "method": method,
                "num_speculative_tokens": K,
                "draft_sample_method": "probabilistic",
            },
            "tensor_parallel_size": tp,
            "enable_batch_sharded_sampling": tp > 1,
            "draft_logits_layout": layout,
            "max_num_seqs": max_num_seqs,
            "vocab_size": VOCAB_SIZE,
            "dtype": "bfloat16",
        }
    )
    plan = resolve(config, REGISTRY)
    context = SpeculatorContext(
        spec=plan.inputs.spec,
        config=plan.inputs.config,
        setup=plan.inputs.setup,
        draft_path=None,
        max_model_len=64,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )
    speculator = Toy(context)
    target = Target(vocab_size=VOCAB_SIZE, dtype=torch.bfloat16)
    speculator.load_model(target)
    sampler = RejectionSampler(vocab_size=VOCAB_SIZE)
    plan = finalize(plan, target, speculator, sampler, shard_idx=rank)
    cache = speculator.allocate_draft_logits(plan, torch.device("cpu"))
    speculator.bind(
        DraftSampler(
            cache=cache,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=max_num_seqs,
            num_speculative_tokens=K,
            device="cpu",
            greedy=False,
            target_ids=speculator.target_ids,
        ),
        None,
    )
    return speculator, plan


def propose(speculator, slots, temperature, seeds):
    slots = torch.tensor(slots)
    speculator.sampler.begin(slots, slots, temperature, seeds)
    inputs = SimpleNamespace(sample_idx_mapping=slots, num_reqs=len(slots))
    return speculator.propose(inputs).tokens


def targets_of(method):
    """Logits `[MAX_NUM_SEQS, K + 1, VOCAB_SIZE]` that agree with the drafter now and then."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(MAX_NUM_SEQS, K + 1, VOCAB_SIZE, generator=generator).mul(0.7)
    columns = TARGET_IDS if method == "reduced" else torch.arange(VOCAB_SIZE)
    for slot in range(MAX_NUM_SEQS):
        for step in range(K):
            rows[slot, step, columns] += logits_of(method, slot, step)
    return rows


def verify(method, cache, drafts, slots, temperature, seeds):
    """What a rank emits for the requests at `slots`."""
    slots = torch.tensor(slots)
    num_reqs = len(slots)
    off = torch.zeros(MAX_NUM_SEQS)
    output = RejectionSampler(vocab_size=VOCAB_SIZE)(
        VerifyInputs(
            target_logits=targets_of(method)[slots].flatten(0, 1),
            draft_tokens=drafts,
            idx_mapping=slots,
            cu_num_logits=torch.arange(num_reqs + 1) * (K + 1),
            positions=torch.full((num_reqs,), 20),
            expanded_idx_mapping=slots.repeat_interleave(K + 1),
            temperature=temperature,
            seeds=seeds,
            top_k=off.long(),
            top_p=off + 1,
            min_p=off,
            has_cutoffs=False,
            draft_logits=cache,
        )
    )
    return output.sampled


TEMPERATURE = torch.tensor([1.0, 0.0, 0.7, 1.0, 1.5, 1.0])
SEEDS = torch.arange(MAX_NUM_SEQS) * 17 + 3


@pytest.mark.parametrize("method", LAYOUTS)
def test_auto_takes_the_smallest_layout_that_the_drafter_writes_and_the_sampler_reads(method):
    _, plan = load(method, max_num_seqs=64)
    assert plan.layout is SMALLEST[method]
    assert set(plan.possible_layouts) == LAYOUTS[method]
    sizes = [size.total_bytes for size in plan.possible_layouts.values()]
    assert plan.bytes_per_rank + plan.side_bytes_per_rank == min(sizes)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("method", "layout"), CASES)
def test_every_layout_takes_the_bytes_of_its_plan(method, layout, tp):
    speculator, plan = load(method, layout.value, tp=tp, rank=tp - 1)
    cache = speculator.draft_logits
    assert (cache.layout, cache.shard.num_shards, cache.shard.shard_idx) == (layout, tp, tp - 1)
    assert (cache.nbytes, cache.side_nbytes) == (plan.bytes_per_rank, plan.side_bytes_per_rank)
    assert tuple(cache.logits.shape) == plan.shape
    assert plan.possible_layouts[layout].logits_bytes == cache.nbytes


@pytest.mark.parametrize("method", LAYOUTS)
def test_tokens_drafted_and_emitted_do_not_depend_on_layout_or_shards(method):
    """Two proposals, so that what a cell held before is overwritten in every layout."""
    drafted, emitted = set(), set()
    for layout in LAYOUTS[method]:
        for tp in (1, 2):
            result, drafts = {}, []
            for rank in range(tp):
                speculator, _ = load(method, layout.value, tp=tp, rank=rank)
                propose(speculator, [5, 4, 1, 0], TEMPERATURE, SEEDS + 1)
                drafts = propose(speculator, list(range(MAX_NUM_SEQS)), TEMPERATURE, SEEDS)
                drafted.add(str(drafts.tolist()))
                cache = speculator.draft_logits
                owned = [slot for slot in range(MAX_NUM_SEQS) if cache.shard.owns(slot)]
                sampled = verify(method, cache, drafts[owned], owned, TEMPERATURE, SEEDS)
                result |= dict(zip(owned, sampled.tolist(), strict=True))
            emitted.add(str(sorted(result.items())))
            assert any(row[1] >= 0 for row in result.values()), "nothing was accepted"
    assert len(drafted) == 1
    assert len(emitted) == 1


def test_a_missing_map_is_an_error_at_load():
    speculator, plan = load("reduced")
    speculator.target_ids = None
    with pytest.raises(TensorError, match=r"no map into the target's[^$]*60 draft columns"):
        speculator.allocate_draft_logits(plan, torch.device("cpu"))


# A drafter of four columns whose map is [1, 3, 4, 6], in a target's vocabulary of eight

NUM_DRAWS = 20_000
P = torch.tensor([0.20, 0.05, 0.15, 0.10, 0.05, 0.25, 0.15, 0.05])
Q = torch.tensor([0.4, 0.3, 0.2, 0.1])
MAP = torch.arange(4) + torch.tensor([1, 2, 2, 3])


def emitted_with(layout, target_ids=MAP, read_as=None):
    """Chi-square of 20,000 first tokens against P, 7 degrees of freedom; drafts; share kept.

    `read_as` verifies with another map than the drafts were stored with.
    """
    slots = torch.arange(NUM_DRAWS)
    ones = torch.ones(NUM_DRAWS)
    width = 8 if layout is DENSE else 4

    def cache_with(ids):
        logits = torch.zeros(NUM_DRAWS, 1, width)
        return DraftLogitsCache(logits, Shard(), layout, 8, target_ids=ids)

    cache = cache_with(target_ids)
    sampler = DraftSampler(
        cache=cache,
        vocab_size=8,
        max_num_seqs=NUM_DRAWS,
        num_speculative_tokens=1,
        device="cpu",
        greedy=False,
    )
    sampler.begin(slots, slots, ones, slots)
    drafts = sampler.sample(Q.log().expand(NUM_DRAWS, -1).contiguous(), 0, slots * 0 + 2)
    if read_as is not None:
        read = cache_with(read_as)
        for field in ("logits", "temperature", "logsumexp", "state"):
            getattr(read, field).copy_(getattr(cache, field))
        cache = read
    emitted = rejection_sample(
        P.log().repeat(2 * NUM_DRAWS, 1),
        drafts[:, None],
        slots,
        torch.arange(NUM_DRAWS + 1) * 2,
        slots * 0 + 2,
        ones,
        slots,
        cache.view(),
        vocab_size=8,
    )
    counts = torch.bincount(emitted.sampled[:, 0], minlength=8)
    expected = NUM_DRAWS * P
    score = float(((counts - expected) ** 2 / expected).sum())
    return score, set(drafts.tolist()), float((emitted.num_sampled == 2).float().mean())


@pytest.mark.parametrize("layout", [DENSE, DRAFT_VOCAB])
def test_a_reduced_drafter_is_lossless_also_for_tokens_outside_its_map(layout):
    """Reject above 29.9 (once in 10^4). Tokens 0, 2, 5 and 7 come from the residual alone.

    0.3 of the drafts are kept: the sum of min(p, q).
    """
    score, drafted, kept = emitted_with(layout)
    assert drafted == {1, 3, 4, 6}
    assert score < 29.9
    assert abs(kept - 0.3) < 0.02


def test_a_map_that_is_not_the_drafters_is_noticed():
    """What broken variants score: 13,700 (columns taken for ids) and 1,700 (every other id).

    With a map of its own (columns taken for ids) the drafts are other tokens, but verification
    stays lossless: it is the disagreement of the two that is not.
    """
    columns = torch.arange(4)
    score, drafted, _ = emitted_with(DRAFT_VOCAB, columns)
    assert drafted == {0, 1, 2, 3}
    assert score < 29.9
    read_as_columns, _, _ = emitted_with(DRAFT_VOCAB, MAP, read_as=columns)
    read_as_offsets, _, _ = emitted_with(DRAFT_VOCAB, MAP, read_as=torch.tensor([0, 2, 4, 6]))
    assert min(read_as_columns, read_as_offsets) > 100
