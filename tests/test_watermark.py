"""Watermarked drafts: their law over keys, their detection, and the door they go through."""

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.errors import ConfigError, InternalError, TensorError
from specreg.kernels import gumbel_sample, rejection_sample
from specreg.ownership import Shard, rows_per_rank
from specreg.watermark import (
    KEY_VARIABLE,
    KeyedGumbel,
    WatermarkInputs,
    key_state,
    keyed_gumbel,
    unmasked_keyed_gumbel,
)

P = torch.tensor([0.05, 0.15, 0.25, 0.25, 0.30])
Q = torch.tensor([0.60, 0.16, 0.12, 0.08, 0.04])
NUM_KEYS = 20_000


def score_of(tokens, law):
    """Chi-square with 4 degrees of freedom: above 23.5 once in 10^4."""
    expected = len(tokens) * law
    return float(((torch.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum())


def cache_for(max_num_seqs, num_steps, vocab_size, shard=None):
    shard = Shard() if shard is None else shard
    rows = rows_per_rank(max_num_seqs, shard.num_shards)
    logits = torch.zeros(rows, num_steps, vocab_size)
    return DraftLogitsCache(logits, shard, DraftLogitsLayout.DENSE, vocab_size)


def sampler_with(watermarker, cache, num_steps=1, **kwargs):
    max_num_seqs = cache.logits.shape[0] * cache.num_shards
    return DraftSampler(
        cache=cache,
        vocab_size=cache.vocab_size,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=num_steps,
        device="cpu",
        greedy=False,
        watermarker=watermarker,
        **kwargs,
    )


class ManyKeys(KeyedGumbel):
    """A keyed sampler in which each row has a key of its own."""

    def __init__(self):
        super().__init__(0)
        self._start = key_state(torch.arange(NUM_KEYS))


@pytest.fixture(scope="module")
def over_keys():
    """One draft after the same context for each of 20,000 keys, and what verification emits."""
    slots = torch.arange(NUM_KEYS)
    ones = torch.ones(NUM_KEYS)
    cache = cache_for(NUM_KEYS, 1, 5)
    sampler = sampler_with(ManyKeys(), cache)
    history = torch.tensor([[7, 8, 9, 10, -1]]).expand(NUM_KEYS, -1)
    sampler.begin(slots, slots, ones, slots, history)
    logits = Q.log().expand(NUM_KEYS, -1).contiguous()
    drafts = sampler.sample(logits, 0, slots * 0 + 4)
    emitted = rejection_sample(
        P.log().repeat(2 * NUM_KEYS, 1),
        drafts[:, None],
        slots,
        torch.arange(NUM_KEYS + 1) * 2,
        slots * 0 + 4,
        ones,
        slots,
        cache.view(),
        vocab_size=5,
    )
    return drafts, emitted.sampled[:, 0], emitted.num_sampled


def test_over_keys_drafts_follow_the_draft_distribution(over_keys):
    assert score_of(over_keys[0], Q) < 23.5


def test_over_keys_what_is_emitted_follows_the_target(over_keys):
    """Chi-square 2.5; of drafts that are emitted unverified, the broken variant, 1.3e5."""
    drafts, emitted, num_sampled = over_keys
    assert score_of(emitted, P) < 23.5
    assert score_of(drafts, P) > 1e5
    assert 0.42 < float((num_sampled == 2).float().mean()) < 0.46  # 0.44 expected


# Detection


def marked_text(watermarker, num_tokens, vocab_size=300, scale=1.0, seed=0):
    """A text drawn token by token from random logits, by the watermarker or, if None, plainly."""
    generator = torch.Generator().manual_seed(seed)
    zero = torch.zeros(1, dtype=torch.int64)
    text = torch.randint(0, vocab_size, (4,), generator=generator)
    for position in range(num_tokens):
        logits = torch.randn(1, vocab_size, generator=generator) * scale
        if watermarker is None:
            token = gumbel_sample(
                logits, zero, zero, zero + position, torch.ones(1), zero + 5, None, vocab_size=300
            )
        else:
            token = watermarker.sample(
                WatermarkInputs(
                    logits=logits,
                    slots=zero,
                    steps=zero + position % 3,
                    context=text[None, -4:],
                    temperature=torch.ones(1),
                    cache=None,
                    vocab_size=vocab_size,
                    target_ids=None,
                    num_nans=torch.zeros(1, dtype=torch.int32),
                )
            )
        text = torch.cat((text, token))
    return text


def test_the_key_detects_the_mark_and_another_key_does_not():
    """200 tokens: z is 69 with the key, within 3.5 with others and on unmarked text."""
    text = marked_text(KeyedGumbel(1234), 200)
    found = KeyedGumbel(1234).score(text)
    assert found.num_tokens == 200
    assert found.z > 30
    assert all(abs(KeyedGumbel(key).score(text).z) < 3.5 for key in range(10))
    plain = marked_text(None, 200)
    assert abs(KeyedGumbel(1234).score(plain).z) < 3.5


def test_the_mark_survives_edits_and_fades_with_them():
    """Each changed token spoils itself and four contexts."""
    text = marked_text(KeyedGumbel(7), 200)
    clean = KeyedGumbel(7).score(text).z
    text[10::20] = 3
    edited = KeyedGumbel(7).score(text).z
    assert 10 < edited < clean


def test_repeated_windows_count_once_and_short_texts_are_not_scored():
    assert KeyedGumbel(7).score(torch.arange(10).repeat(50)).num_tokens == 10
    assert KeyedGumbel(7).score(torch.arange(4)) == (0, 0.0)


def test_seeds_depend_on_the_key_and_on_each_token_of_the_context_in_order():
    context = torch.tensor([[1, 2, 3, 4], [1, 2, 4, 3], [0, 2, 3, 4], [-1, 2, 3, 4], [1, 2, 3, 5]])
    seeds = torch.cat([KeyedGumbel(key).seeds(context) for key in (0, 1, -1, 2**63)])
    assert len(set(seeds.tolist())) == 20
    ones = sum(bin(seed % 2**64).count("1") for seed in seeds.tolist())
    assert 540 < ones < 740  # 640 expected, sigma 18


# Through the door


class Recorder:
    """Returns the step as every token, and keeps the contexts it was shown."""

    honors_owner_mask = True
    context_size = 3

    def __init__(self):
        self.contexts = []

    def sample(self, inputs):
        self.contexts.append(inputs.context.tolist())
        return torch.where(inputs.slots < 0, -1, 100 + inputs.steps)


def test_the_context_is_the_newest_tokens_and_then_the_drafts():
    watermarker = Recorder()
    sampler = sampler_with(watermarker, cache_for(4, 3, 200), 3)
    slots = torch.tensor([2, -1, 0])
    history = torch.tensor([[1, 2, 3, 4, 5], [-1] * 5, [9, 8, -1, -1, -1]])
    sampler.begin(slots, slots, torch.ones(4), torch.arange(4), history)
    for step in range(3):
        sampler.sample(torch.zeros(3, 200), step, slots * 0)
    assert watermarker.contexts[0] == [[3, 4, 5], [-1, -1, -1], [-1, 9, 8]]
    assert watermarker.contexts[1] == [[4, 5, 100], [-1, -1, -1], [9, 8, 100]]
    assert watermarker.contexts[2] == [[5, 100, 101], [-1, -1, -1], [8, 100, 101]]


def test_a_block_is_marked_step_by_step():
    slots, history = torch.tensor([2, -1, 0]), torch.tensor([[5, 6, 7, 8]] * 3)
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(6).view(3, 2)

    def draw(sample):
        sampler = sampler_with(KeyedGumbel(3), cache_for(4, 2, 50), 2)
        sampler.begin(slots, slots, torch.ones(4), torch.arange(4), history)
        return sample(sampler), sampler.cache.logits

    block, stored = draw(lambda sampler: sampler.sample_block(logits, positions))
    steps, expected = draw(
        lambda sampler: torch.stack(
            [sampler.sample(logits[:, i], i, positions[:, i]) for i in range(2)], 1
        )
    )
    assert torch.equal(block, steps)
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("shard", [Shard(2, 0), Shard(2, 1)], ids=str)
def test_every_rank_marks_alike_and_stores_its_own_rows(shard):
    slots = torch.tensor([3, 0, -1, 2])
    history = torch.tensor([[5, 6, 7, 8, 9]] * 4)
    drawn = []
    for cache in (cache_for(4, 2, 50), cache_for(4, 2, 50, shard)):
        sampler = sampler_with(KeyedGumbel(3), cache, 2)
        sampler.begin(slots, slots, torch.ones(4), torch.arange(4), history)
        logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
        drawn.append([sampler.sample(logits, step, slots * 0).tolist() for step in range(2)])
        stored = {tuple(cell) for cell in (cache.state == 1).nonzero().tolist()}
        owned = {cache.shard.row(slot) for slot in (0, 2, 3) if cache.shard.owns(slot)}
        assert stored == {(row, step) for row in owned for step in (0, 1)}
    assert drawn[0] == drawn[1]
    assert drawn[0][0][2] == -1


def test_the_unmasked_form_stores_every_row_and_refuses_a_sharded_cache():
    watermarker = KeyedGumbel(3, honors_owner_mask=False)
    slots = torch.arange(4)
    history = torch.tensor([[5, 6, 7, 8]] * 4)
    cache = cache_for(4, 1, 50)
    sampler = sampler_with(watermarker, cache)
    sampler.begin(slots, slots, torch.ones(4), slots, history)
    sampler.sample(torch.zeros(4, 50), 0, slots)
    assert cache.state[:, 0].tolist() == [1] * 4
    sampler = sampler_with(watermarker, cache_for(4, 1, 50, Shard(2, 1)))
    sampler.begin(slots, slots, torch.ones(4), slots, history)
    with pytest.raises(InternalError, match=r"handed a sharded cache[^$]*num_shards=2"):
        sampler.sample(torch.zeros(4, 50), 0, slots)


def test_what_a_watermarker_cannot_draw_is_refused():
    slots = torch.arange(2)
    cache = cache_for(2, 2, 50)
    sampler = sampler_with(KeyedGumbel(3), cache, 2)
    with pytest.raises(TensorError, match=r"begin\(token_history\)[^$]*None rows"):
        sampler.begin(slots, slots, torch.ones(2), slots)
    sampler.begin(slots, slots, torch.ones(2), slots, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TensorError, match=r"several steps at once[^$]*supports_watermarker"):
        sampler.sample(torch.zeros(4, 50), torch.tensor([0, 1, 0, 1]), torch.arange(4))
    with pytest.raises(TensorError, match="candidates cannot be drawn by a watermarker"):
        sampler.sample_candidates(torch.zeros(2, 3), torch.zeros(2, 3), 0, slots)
    with pytest.raises(InternalError, match="no distribution to store or to mark"):
        DraftSampler(
            cache=None,
            vocab_size=50,
            max_num_seqs=2,
            num_speculative_tokens=1,
            device="cpu",
            greedy=True,
            watermarker=KeyedGumbel(3),
        )


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for factory in (keyed_gumbel, unmasked_keyed_gumbel):
        with pytest.raises(ConfigError, match=rf"needs a secret key[^$]*set {KEY_VARIABLE}"):
            factory(None)
    monkeypatch.setenv(KEY_VARIABLE, "correct horse")
    assert keyed_gumbel(None).key == unmasked_keyed_gumbel(None).key
    assert keyed_gumbel(None).honors_owner_mask
    assert not unmasked_keyed_gumbel(None).honors_owner_mask
    first = keyed_gumbel(None).key
    monkeypatch.setenv(KEY_VARIABLE, "correct horsf")
    assert keyed_gumbel(None).key != first


def test_nothing_is_lent_to_fused_samplers_where_a_watermarker_draws():
    cache = cache_for(2, 1, 5)
    assert sampler_with(KeyedGumbel(0), cache, fused_sampling=FusedSampling.SHARDED).lend() is None
