"""The `cell_statistics` kernels compile for GPUs that are not there, and address with 64 bits."""

import pytest
import torch

pytest.importorskip("triton")

from offline import TARGETS, compile_offline, narrow_products

from specreg.kernels.cell_statistics import kernel as k
from specreg.kernels.common.args import CacheArgs

VOCAB_SIZE, NUM_STEPS, NUM_CANDIDATES = 248_320, 7, 20
FP32, BF16, I32, I64, U8 = (
    torch.empty(1, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
)


def kernels(*, num_shards=1, width=VOCAB_SIZE, logits=BF16, ids=None):
    cells = (logits, FP32, FP32, U8, NUM_STEPS * width, width, NUM_STEPS, num_shards - 1, width)
    num_blocks = -(-width // k.BLOCK_SIZE)
    padded = 1 << (num_blocks - 1).bit_length()
    given = {
        "peaks": FP32,
        "masses": I32,
        "cache": CacheArgs(*cells, None, ids, NUM_STEPS * width, width),
        "idx_mapping": I64,
        "num_blocks": num_blocks,
        "NUM_STEPS": NUM_STEPS,
        "NUM_SHARDS": num_shards,
        "NUM_BLOCKS": min(k.BLOCKS_PER_PROGRAM, padded),
        "BLOCK_SIZE": k.BLOCK_SIZE,
    }
    yield k.cell_blocks_kernel, given
    yield k.cell_totals_kernel, given | {"NUM_BLOCKS": padded}


VARIANTS = {
    "dense": {},
    "dense, tp 4": {"num_shards": 4},
    "top_k": {"width": NUM_CANDIDATES, "logits": FP32, "ids": I32},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for(variant, target):
    for kernel, arguments in kernels(**VARIANTS[variant]):
        stages = compile_offline(kernel, target, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]
        assert narrow_products(stages["ttir"]) == []
