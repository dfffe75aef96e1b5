"""specreg's own fused sampler: the op `markov_sample`."""

from __future__ import annotations

from collections.abc import Callable

from specreg.kernels import markov_sample
from specreg_dspark.hooks import MarkovSamplerContext
from specreg_dspark.markov_inputs import MarkovInputs

__all__ = ["make_stock_sampler", "sample_stock"]


def make_stock_sampler(context: MarkovSamplerContext) -> Callable[[MarkovInputs], bool]:
    """It keeps nothing between proposals."""
    del context
    return sample_stock


def sample_stock(inputs: MarkovInputs) -> bool:
    """Draw all steps; never declines.

    On a GPU in K + 1 launches, and one more to fill the rows where a reduced vocabulary is
    scattered into a dense cache.

    Args:
        inputs: as `MarkovInputs` says; cells get their statistics too.

    Raises:
        TensorError: tensors that the op `markov_sample` refuses.
    """
    inputs.tokens.copy_(
        markov_sample(
            inputs.base_logits,
            inputs.anchors,
            inputs.idx_mapping,
            inputs.positions,
            inputs.w1,
            inputs.w2,
            inputs.temperature,
            inputs.seeds,
            inputs.cache,
            vocab_size=inputs.vocab_size,
            target_ids=inputs.target_ids,
            scale=inputs.scale,
            soft_cap=inputs.soft_cap,
            num_nans=inputs.num_nans,
            greedy=inputs.greedy,
        )
    )
    return True
