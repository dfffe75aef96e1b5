"""The fused sampler of DSpark on a GPU: the loop's tokens and cells, probed, captured, replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from markov_toys import NUM_STEPS, VOCAB_SIZE, make_choice, make_probe
from specreg_dspark.markov_inputs import MarkovInputs
from specreg_dspark.random_drafter import random_dspark
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout, FusedSampling
from specreg.config import EngineConfig
from specreg.draft_logits import DraftLogitsCache
from specreg.draft_sampler import DraftSampler
from specreg.model_config import read_model_config
from specreg.ownership import Shard
from specreg.runtime.engine import Engine
from specreg.sampling_params import SamplingParams
from specreg.testing import save_kit_target

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

DENSE, DRAFT_VOCAB = DraftLogitsLayout.DENSE, DraftLogitsLayout.DRAFT_VOCAB
REDUCED = 11
PROMPTS = [[3, 4, 5, 6, 3, 4, 5], [7], [8, 9] * 9, [5, 3, 5, 3, 5], [11, 12, 13]]
PARAMS = [
    SamplingParams(max_tokens=length, temperature=temperature, seed=length, ignore_eos=True)
    for length, temperature in [(20, 0.8), (9, 0.0), (14, 1.3), (20, 1.0), (3, 0.5)]
]
CLOSE = {"rtol": 3e-5, "atol": 3e-5}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_the_kernels_keep_to_the_rows_of_their_rank(tp: int, is_reduced: bool) -> None:
    target_ids = torch.arange(0, VOCAB_SIZE, 2) if is_reduced else None
    layouts = (DENSE, DRAFT_VOCAB) if is_reduced else (DENSE,)
    choice = make_choice(tp=tp, device=DEVICE, probe=make_probe(tp, layouts, target_ids, DEVICE))
    assert (choice.name, choice.opt_out_reason) == ("markov_sample", "")


class Proposals:
    """A batch of eight rows, drawn by the fused sampler or by a loop, with a cache of its own."""

    num_reqs = 8

    def __init__(self, shard: Shard) -> None:
        generator = torch.Generator().manual_seed(1)
        self.head = make_probe(shard.num_shards, device=DEVICE)
        self.base = torch.randn(self.num_reqs, NUM_STEPS, VOCAB_SIZE, generator=generator)
        self.base = self.base.to(DEVICE)
        self.anchors = torch.arange(self.num_reqs, device=DEVICE)
        self.positions = 10 * self.anchors + 3
        self.slots = self.anchors.flip(0).contiguous()
        rows = -(-self.num_reqs // shard.num_shards)
        logits = torch.full((rows, NUM_STEPS, VOCAB_SIZE), torch.nan, device=DEVICE)
        self.cache = DraftLogitsCache(logits, shard, DENSE, VOCAB_SIZE)
        self.sampler = DraftSampler(
            cache=self.cache,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=self.num_reqs,
            num_speculative_tokens=NUM_STEPS,
            device=DEVICE,
            greedy=False,
            fused_sampling=FusedSampling.SHARDED,
        )
        self.temperature = (self.anchors % 3).float()
        self.choice = make_choice(tp=shard.num_shards, device=DEVICE, probe=self.head)
        self.choice.bind(self.sampler)

    def begin(self, num_live: int) -> None:
        self.slots.copy_(torch.arange(self.num_reqs, device=DEVICE).flip(0))
        self.slots[num_live:] = -1
        self.cache.logits.fill_(torch.nan)
        self.sampler.begin(self.slots, self.slots, self.temperature, self.anchors)

    def fused(self) -> Tensor:
        lent = self.sampler.lend()
        assert lent is not None
        inputs = MarkovInputs.of(
            lent,
            base_logits=self.base,
            anchors=self.anchors,
            positions=self.positions,
            w1=self.head.w1,
            w2=self.head.w2,
            scale=1.0,
            soft_cap=None,
        )
        assert self.choice.run(inputs)
        return inputs.tokens

    def loop(self) -> Tensor:
        previous, tokens = self.anchors, []
        for step in range(NUM_STEPS):
            bias = self.head.w1[previous.clamp(min=0)] @ self.head.w2.T
            previous = self.sampler.sample(self.base[:, step] + bias, step, self.positions + step)
            tokens.append(previous)
        return torch.stack(tokens, 1)

    def cells(self) -> list[Tensor]:
        cache = self.cache
        return [t.clone() for t in (cache.logits, cache.temperature, cache.logsumexp)]


@pytest.mark.parametrize("shard", [Shard(), Shard(4, 2)], ids=str)
def test_a_captured_proposal_is_the_loops_when_it_is_replayed_with_fewer_live_rows(
    shard: Shard,
) -> None:
    fused, loop = Proposals(shard), Proposals(shard)
    fused.begin(fused.num_reqs)
    fused.fused()  # Compiles, before anything is captured.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = fused.fused()
    for num_live in (8, 3, 0, 5):
        fused.begin(num_live)
        loop.begin(num_live)
        graph.replay()
        assert torch.equal(tokens, loop.loop())
        assert bool((tokens[num_live:] == -1).all())
        for got, wanted in zip(fused.cells(), loop.cells(), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True, **CLOSE)
        assert torch.equal(fused.cache.state, loop.cache.state)


def drafted(folder: Path, drafter: dict[str, Any], **config: Any) -> tuple[str | None, Any]:
    """The sampler in use and the tokens of two calls, the second with other inputs."""
    settings = {
        "target": str(folder / "target"),
        "speculative": {
            **drafter,
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
            **config.pop("options"),
        },
        "max_model_len": 64,
        "num_kv_blocks": 48,
        "device": DEVICE,
        **config,
    }
    with Engine.from_config(EngineConfig.parse(settings)) as engine:
        drafting: Any = engine.models.drafting
        runs = [engine.generate(PROMPTS, PARAMS), engine.generate(PROMPTS[:2], PARAMS[:2])]
        tokens = [[output.token_ids for output in run] for run in runs]
        return drafting.speculator.sampler_choice.name, tokens


@pytest.mark.parametrize("draft_vocab_size", [None, REDUCED])
def test_runs_emit_the_loops_tokens_eagerly_and_from_graphs(
    draft_vocab_size: int | None, tmp_path: Path
) -> None:
    target = save_kit_target(tmp_path / "target")
    drafter = random_dspark(
        tmp_path / "draft", read_model_config(str(target)) or {}, draft_vocab_size=draft_vocab_size
    )
    loop = drafted(tmp_path, drafter, options={"fused_sampling": "off"}, cuda_graph_sizes=[2, 8])
    assert loop[0] is None
    for is_eager in (True, False):
        fused = drafted(
            tmp_path, drafter, options={}, enforce_eager=is_eager, cuda_graph_sizes=[2, 8]
        )
        assert fused == ("markov_sample", loop[1])
