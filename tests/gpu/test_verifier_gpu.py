"""Processors, log probabilities and reports on a GPU, against the same on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from specreg.logprobs import LogprobsFormat, LogprobsQuery
from specreg.ownership import Shard
from specreg.rejection_sampler import RejectionSampler
from specreg.runtime.slot_processors import SlotProcessors
from specreg.runtime.slot_state import SlotState
from specreg.runtime.step import Admission, ScheduledRow, encode_masks
from specreg.runtime.verifier import OwnedBatch, Verified, Verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

V, K, NUM_REQS = 49_153, 3, 24
LAYOUT = LogprobsFormat(4, 2)
KINDS: list[dict[str, Any]] = [
    {},
    {"logit_bias": [[3, 4.0], [V - 1, 6.0]]},
    {"penalties": [1.5, 0.5, 0.25], "prompt_token_ids": [1, 2], "output_token_ids": [7, 7]},
    {"allowed_token_ids": [5, 9, 4096, V - 1]},
    {"num_top_logprobs": 4, "logprob_token_ids": [0, V - 1]},
    {"top_k": 5, "penalties": [1.0, 2.0, 0.0], "prompt_token_ids": [9]},
]


def decided(device: str, dtype: torch.dtype) -> tuple[Verified, Tensor]:
    """One batch of requests that all differ; request 6 has a row of NaN and 7 a mask."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(NUM_REQS * (K + 1), V, generator=generator)).to(dtype)
    logits[6 * (K + 1)] = float("nan")
    drafts = logits.view(NUM_REQS, K + 1, V)[:, :K].float().nan_to_num(0).argmax(2)
    place = torch.device(device)
    state, processors = SlotState(NUM_REQS, place), SlotProcessors(V, place, Shard())
    for slot in range(NUM_REQS):
        asks = {"temperature": 0.25 * (slot % 5), "top_k": 0, **KINDS[slot % len(KINDS)]}
        admission = Admission(slot=slot, top_p=1.0, min_p=0.0, seed=slot, **asks)
        state.admit(admission)
        processors.admit(admission)
    mask = sum(1 << token for token in range(0, 40_000, 7)).to_bytes(5_000, "little")
    processors.begin([ScheduledRow(7, 0, [1] * 4, K + 1, 0, bitmasks=encode_masks([mask] * 4))])
    verify = Verifier(RejectionSampler(vocab_size=V), state, processors, None, V)
    batch = OwnedBatch(
        torch.arange(NUM_REQS),
        (K + 1) * torch.arange(NUM_REQS + 1),
        drafts.to(place),
        torch.arange(NUM_REQS, device=place),
    )
    logits = logits.to(place)
    before = logits.clone()
    verified = verify(logits, batch, LAYOUT)
    processors.count(list(range(NUM_REQS)), verified.sampled)
    again = verify(logits, batch, LAYOUT)
    assert torch.equal(logits.nan_to_num(0), before.nan_to_num(0))
    return verified, again.sampled.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_decides_and_reports_what_the_cpu_does(dtype: torch.dtype) -> None:
    (expected, expected_again), (actual, again) = decided("cpu", dtype), decided("cuda", dtype)
    for name in ("sampled", "num_sampled", "num_nans", "num_usable"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert torch.equal(again, expected_again)
    assert not torch.equal(again, expected.sampled)  # what was counted changes what follows
    assert int(expected.num_usable[6]) == 0
    assert expected.num_sampled.unique().numel() > 2
    query = LogprobsQuery(4, (0, V - 1))
    for slot in range(4, NUM_REQS, len(KINDS)):
        tokens = expected.sampled[slot, : int(expected.num_sampled[slot])].tolist()
        reports = [
            LAYOUT.unpack(part.logprobs[slot].view(K + 1, -1).cpu(), tokens, query)
            for part in (actual, expected)
        ]
        for mine, theirs in zip(*reports, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            for some, others in ((mine.top, theirs.top), (mine.asked, theirs.asked)):
                values = [value for _, value in others]
                assert [value for _, value in some] == pytest.approx(values, abs=1e-4)


def test_processors_and_reports_do_not_wait_for_the_device() -> None:
    """With cut-offs verification does wait, so the requests here have none."""
    place = torch.device("cuda")
    state, processors = SlotState(4, place), SlotProcessors(V, place, Shard())
    for slot, kind in enumerate(KINDS[1:5]):
        asks = {"temperature": 0.8, "top_k": 0, **kind}
        admission = Admission(slot=slot, top_p=1.0, min_p=0.0, seed=slot, **asks)
        state.admit(admission)
        processors.admit(admission)
    verify = Verifier(RejectionSampler(vocab_size=V), state, processors, None, V)
    logits = torch.randn(4 * (K + 1), V, device=place)
    drafts = torch.zeros(4, K, dtype=torch.int64, device=place)
    positions = torch.zeros(4, dtype=torch.int64, device=place)
    batch = OwnedBatch(torch.arange(4), (K + 1) * torch.arange(5), drafts, positions)
    verify(logits, batch, LAYOUT)  # compiles what there is to compile
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        verified = verify(logits, batch, LAYOUT)
        processors.count([0, 1, 2, 3], verified.sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
