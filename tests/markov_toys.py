"""Fused samplers for tests, and choices among them without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import specreg_dspark
import torch
from specreg_dspark.hooks import MarkovSamplerSpec
from specreg_dspark.markov_inputs import MarkovInputs
from specreg_dspark.options import DSparkOptions
from specreg_dspark.probe import Probe
from specreg_dspark.sampler_choice import SamplerChoice
from specreg_dspark.stock_sampler import sample_stock

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.config import EngineConfig
from specreg.plugin import hookimpl
from specreg.registry import Registry

__all__ = ["SamplersPlugin", "make_choice", "make_inputs", "make_probe", "sampler_spec"]

VOCAB_SIZE, RANK, NUM_STEPS = 17, 4, 3


class SamplersPlugin:
    """A plugin whose distribution is called `name`, with samplers and nothing else."""

    def __init__(self, *specs: Any, name: str = "toy-samplers") -> None:
        self.__name__ = name
        self.specs = specs

    @hookimpl(optionalhook=True)
    def specreg_dspark_markov_samplers(self) -> Iterable[Any]:
        return self.specs


def sampler_spec(name: str, maker: str | None = None, **changes: Any) -> MarkovSamplerSpec:
    """A spec whose factory is a function of this module; it declares `sharded` with statistics."""
    facts = {"writes": FusedSampling.SHARDED, "stores_statistics": True}
    return MarkovSamplerSpec(name, f"markov_toys:{maker or name}", **{**facts, **changes})


def make_probe(
    num_ranks: int = 2,
    layouts: tuple[DraftLogitsLayout, ...] = (DraftLogitsLayout.DENSE,),
    target_ids: torch.Tensor | None = None,
    device: str = "cpu",
    max_num_seqs: int = 8,
) -> Probe:
    generator = torch.Generator().manual_seed(0)
    num_columns = VOCAB_SIZE if target_ids is None else len(target_ids)
    return Probe(
        max_num_seqs=max_num_seqs,
        num_ranks=num_ranks,
        num_steps=NUM_STEPS,
        w1=torch.randn(VOCAB_SIZE, RANK, generator=generator).to(device),
        w2=torch.randn(num_columns, RANK, generator=generator).to(device),
        scale=1.0,
        soft_cap=None,
        vocab_size=VOCAB_SIZE,
        target_ids=None if target_ids is None else target_ids.to(device),
        dtype=torch.float32,
        layouts=layouts,
    )


def make_choice(
    *plugins: object,
    tp: int = 2,
    device: str = "cpu",
    drafts: str = "probabilistic",
    draft_config: Mapping[str, Any] | None = None,
    watermarker: str | None = None,
    obstacle: str = "",
    probe: Probe | None = None,
    **options: Any,
) -> SamplerChoice:
    """The choice of a run with these plugins beside DSpark's; tables lie on the CPU."""
    speculative = {
        "method": "dspark",
        "num_speculative_tokens": NUM_STEPS,
        "draft_sample_method": drafts,
    }
    config = {
        "speculative": speculative,
        "tensor_parallel_size": tp,
        "draft_watermarker": watermarker,
    }
    context: Any = SimpleNamespace(
        options=DSparkOptions(**options),
        config=EngineConfig.parse(config),
        registry=Registry.from_plugins([specreg_dspark, *plugins]),
        device=torch.device(device),
        draft_config=draft_config or {},
    )
    return SamplerChoice(context, probe or make_probe(tp), obstacle)


def make_inputs(num_reqs: int = 2) -> MarkovInputs:
    """A greedy batch without a cache."""
    probe = make_probe()
    return MarkovInputs(
        base_logits=torch.zeros(num_reqs, NUM_STEPS, VOCAB_SIZE),
        anchors=torch.zeros(num_reqs, dtype=torch.int64),
        positions=torch.zeros(num_reqs, dtype=torch.int64),
        idx_mapping=torch.arange(num_reqs),
        w1=probe.w1,
        w2=probe.w2,
        scale=1.0,
        soft_cap=None,
        temperature=torch.zeros(8),
        seeds=torch.zeros(8, dtype=torch.int64),
        cache=None,
        vocab_size=VOCAB_SIZE,
        target_ids=None,
        greedy=True,
        num_nans=None,
        tokens=torch.full((num_reqs, NUM_STEPS), -2),
    )


def honest(context: Any) -> Any:
    return sample_stock


def declining(context: Any) -> Any:
    return lambda inputs: False


def for_one_row(context: Any) -> Any:
    return lambda inputs: len(inputs.tokens) == 1 and sample_stock(inputs)


def dense_alone(context: Any) -> Any:
    is_dense = DraftLogitsLayout.DENSE
    return lambda inputs: _cells(inputs).layout is is_dense and sample_stock(inputs)


def _after(change: Any) -> Any:
    """A maker of a sampler that is right but for what `change` does to the inputs afterwards."""

    def maker(context: Any) -> Any:
        def sampler(inputs: MarkovInputs) -> Any:
            sample_stock(inputs)
            answer = change(inputs)
            return True if answer is None else answer

        return sampler

    return maker


def _cells(inputs: MarkovInputs) -> Any:
    assert inputs.cache is not None
    return inputs.cache


def _every_slot_to_its_row(inputs: MarkovInputs) -> None:
    """The row is that of the owner, but whoever stores, stores; its own requests' last."""
    slots = inputs.idx_mapping[inputs.idx_mapping >= 0]
    _cells(inputs).logits[slots // _cells(inputs).shard.num_shards] = 1.0
    sample_stock(inputs)


def _padding_before_the_cache(inputs: MarkovInputs) -> None:
    logits = _cells(inputs).logits
    if -1 in inputs.idx_mapping.tolist():
        start = logits.storage_offset() - logits.stride(0)
        torch.as_strided(logits, logits.shape[1:], logits.stride()[1:], start)[0, 0] = 1.0


def _keeps(**changed: Any) -> Any:
    def change(inputs: MarkovInputs) -> bool:
        for name, value in changed.items():
            getattr(inputs, name)[:1] = value
        return False

    return lambda context: change


def _one_state(inputs: MarkovInputs) -> None:
    _cells(inputs).state[0, 0] = 1


def _no_state(inputs: MarkovInputs) -> None:
    cells = _cells(inputs)
    cells.state[cells.state == 1] = 0


def _always_stored(inputs: MarkovInputs) -> None:
    """Its cells are stored ones, even without a logit above -inf."""
    cells = _cells(inputs)
    cells.state[cells.state == 0] = 1


def _no_last_column(inputs: MarkovInputs) -> None:
    logits = _cells(inputs).logits
    sentinel = torch.full((4,), 0xA5, dtype=torch.uint8).view(torch.float32)
    logits[..., -1] = sentinel


def _token_of_the_rank(inputs: MarkovInputs) -> None:
    slots = inputs.idx_mapping
    is_drawn = (slots >= 0) & (inputs.temperature[slots] > 0)
    inputs.tokens[is_drawn] = (inputs.tokens[is_drawn] + _cells(inputs).shard.shard_idx) % 7


def _padding_is_a_token(inputs: MarkovInputs) -> None:
    inputs.tokens.clamp_(min=0)


def _base_changed(inputs: MarkovInputs) -> None:
    inputs.base_logits.zero_()


def _only_full_batches(context: Any) -> Any:
    return lambda inputs: bool((inputs.idx_mapping >= 0).sum() > 2) and sample_stock(inputs)


def _raises(context: Any) -> Any:
    def sampler(inputs: MarkovInputs) -> bool:
        _cells(inputs).logits[inputs.idx_mapping] = 1.0
        return True

    return sampler


def cannot_be_made(context: Any) -> Any:
    raise RuntimeError("no compiler")


def _declines_behind_a_store(inputs: MarkovInputs) -> bool:
    return False


def _on_cells(name: str, change: Any) -> Any:
    """What `change` makes of a field of the cells that were stored."""

    def of_inputs(inputs: MarkovInputs) -> None:
        cells = _cells(inputs)
        is_stored, field = cells.state == 1, getattr(cells, name)
        field[is_stored] = change(field[is_stored])

    return _after(of_inputs)


def _many_as_one(inputs: MarkovInputs) -> None:
    """Its kernel for many rows stores without a look at the owner."""
    if len(inputs.tokens) > 5:
        _every_slot_to_its_row(inputs)


def faulty_full_cache(context: Any) -> Any:
    return lambda inputs: 1


def declining_a_full_one(context: Any) -> Any:
    def sampler(inputs: MarkovInputs) -> bool:
        if _cells(inputs).shard.num_shards == 1:
            return False
        _every_slot_to_its_row(inputs)
        return True

    return sampler


def only_what_there_can_be(context: Any) -> Any:
    """Breaks on more rows, or a slot further on, than a run has."""

    def sampler(inputs: MarkovInputs) -> bool:
        assert len(inputs.tokens) <= context.max_num_seqs
        assert int(inputs.idx_mapping.max()) < context.max_num_seqs
        return sample_stock(inputs)

    return sampler


every_slot_to_its_row = _after(_every_slot_to_its_row)
padding_before_the_cache = _after(_padding_before_the_cache)
one_state = _after(_one_state)
no_state = _after(_no_state)
always_stored = _after(_always_stored)
no_last_column = _after(_no_last_column)
token_of_the_rank = _after(_token_of_the_rank)
padding_is_a_token = _after(_padding_is_a_token)
base_changed = _after(_base_changed)
another_temperature = _on_cells("temperature", lambda value: value + 0.5)
another_logsumexp = _on_cells("logsumexp", lambda value: value + 0.01)
another_row = _on_cells("logits", lambda value: -value)
many_as_one = _after(_many_as_one)


def changing(name: str) -> Any:
    """A sampler that adds one to one of its inputs behind its draws."""

    def sampler(inputs: MarkovInputs) -> bool:
        sample_stock(inputs)
        getattr(inputs, name).add_(1)
        return True

    return sampler


no_answer = _after(lambda inputs: 1)
only_full_batches = _only_full_batches
raises = _raises
declines_behind_a_store = _after(_declines_behind_a_store)
declines_behind_tokens = _keeps(tokens=3)
declines_behind_a_count = _keeps(num_nans=3)


def flat_slots(context: Any) -> Any:
    """Stores at `slot * stride`, as if the cache had every request."""

    def sampler(inputs: MarkovInputs) -> bool:
        cells = _cells(inputs)
        shape = (len(inputs.seeds), *cells.logits.shape[1:])
        whole = torch.as_strided(
            cells.logits, shape, cells.logits.stride(), cells.logits.storage_offset()
        )
        for row, slot in enumerate(inputs.idx_mapping.tolist()):
            if slot >= 0:
                whole[slot] = inputs.base_logits[row]
        largest = inputs.base_logits.argmax(2)
        inputs.tokens.copy_(torch.where(inputs.idx_mapping[:, None] >= 0, largest, -1))
        return True

    return sampler


def changing_its_mind(context: Any) -> Any:
    answers = iter([True, False])

    def sampler(inputs: MarkovInputs) -> bool:
        inputs.tokens.fill_(0)
        return next(answers)

    return sampler


def not_a_sampler(context: Any) -> Any:
    return 3
