"""The exact law of the sampler, enumerated over every value that its random words can take.

Total variation from softmax, logits normal x scale, allowed 1e-4:

    vocab_size   scale   two words   one word for the whole row (broken)
       151,936     0      6.9e-06     3.0e-03
       151,936     1      1.3e-05     3.0e-03
       151,936     3      1.6e-05     2.4e-03
       248,320     0      5.2e-06     5.1e-03
       248,320     1      1.5e-05     4.9e-03
       248,320     3      2.0e-05     3.7e-03
"""

import dataclasses

import pytest
import torch
from draft_sample_cases import make_batch, make_cache

from specreg.kernels import draft_sample
from specreg.kernels.common.reference import draw_index_reference, point_reference
from specreg.kernels.draft_sample.reference import Blocks

NUM_UNIFORMS = 2**23


def law_of(units):
    """fp64: probability of each lane of int64 `units [..., n]` under `draw_index_reference`.

    A lane is drawn by the uniforms whose point lies in its share of the cumulative sum. The first
    of them is found by bisection around an estimate, as the point grows with the uniform.
    """
    cumulative = units.cumsum(-1)
    total = cumulative[..., -1:].expand_as(cumulative)
    estimate = (cumulative.double() / total * NUM_UNIFORMS).long()
    low, high = (estimate - 3).clamp(min=0), (estimate + 3).clamp(max=NUM_UNIFORMS)
    while bool((low < high).any()):
        middle = (low + high) // 2
        is_below = point_reference(total, middle << 9) < cumulative
        low = torch.where(is_below & (low < high), middle + 1, low)
        high = torch.where(is_below, high, middle)
    return low.diff(dim=-1, prepend=torch.zeros_like(low[..., :1])).double() / NUM_UNIFORMS


def all_block_weights(blocks, inverse_temperature):
    """The weights that a second draw would use, for every block of a single row."""
    num_blocks = blocks.peak.shape[1]
    repeated = dataclasses.replace(
        blocks,
        logits=blocks.logits.expand(num_blocks, -1, -1),
        peak=blocks.peak.expand(num_blocks, -1),
    )
    return repeated.weights(torch.arange(num_blocks), inverse_temperature.expand(num_blocks))


def two_word_law(logits, temperature):
    inverse = torch.tensor([1.0 / temperature])
    blocks = Blocks.cut(logits[None])
    by_block = law_of(blocks.masses(inverse))[0]
    by_lane = law_of(all_block_weights(blocks, inverse))
    return (by_block[:, None] * by_lane).flatten()[: len(logits)]


def one_word_law(logits, temperature):
    """The broken variant: one word chooses among all columns, with weights as fine."""
    weights = ((logits - logits.max()) / temperature).double().exp() * 2.0**30
    return law_of(weights.long())


def total_variation(law, logits, temperature):
    softmax = (logits.double() / temperature).softmax(-1)
    return float((law - softmax).abs().sum() / 2)


@pytest.mark.parametrize("scale", [0, 1, 3])
@pytest.mark.parametrize("vocab_size", [151_936, 248_320])
def test_the_law_is_softmax_within_1e_4_and_that_of_one_word_is_not(vocab_size, scale):
    logits = make_batch([0], vocab_size, scale=scale).logits[0]
    law = two_word_law(logits, 1.0)
    assert float(law.sum()) == 1.0
    assert total_variation(law, logits, 1.0) < 1e-4
    assert total_variation(one_word_law(logits, 1.0), logits, 1.0) > 1e-3


def test_the_bisected_law_is_the_one_that_all_uniforms_give():
    units = torch.tensor([0, 5, 2**40, 0, 3 * 2**38, 1, 2**20, 0])
    words = torch.arange(NUM_UNIFORMS) << 9
    drawn = torch.cat(
        [draw_index_reference(units.expand(len(part), -1), part) for part in words.split(2**20)]
    )
    counts = torch.bincount(drawn, minlength=len(units)).double()
    assert torch.equal(law_of(units), counts / NUM_UNIFORMS)
    assert counts[units == 0].eq(0).all()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_stored_statistics_describe_the_law_that_tokens_are_drawn_from(temperature, cache_dtype):
    """Verification's q, exp(stored logit / temperature - logsumexp), is the sampler's law."""
    batch = make_batch([0], 20_000, temperature=temperature)
    cache = make_cache(1, 1, 20_000, dtype=cache_dtype)
    draft_sample(*batch, cache, vocab_size=20_000)
    stored = cache.logits[0, 0].double()
    q = (stored / float(cache.temperature[0, 0]) - cache.logsumexp[0, 0].double()).exp()
    law = two_word_law(cache.logits[0, 0], temperature)
    assert float((law - q).abs().sum() / 2) < 1e-4
    if cache_dtype is torch.bfloat16:
        unrounded = batch.logits[0].double().div(temperature).softmax(-1)
        assert float((unrounded - q).abs().sum() / 2) > 2e-4
