"""The `markov_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import re

import pytest
import torch

pytest.importorskip("triton")

from markov_sample_variants import VARIANTS, kernels
from offline import TARGETS, compile_offline

DIVISION = re.compile(r"arith\.(rem|div|ceildiv|floordiv)\w*i\b")
STEP = {"num_reqs": 8, "num_shards": 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for(variant, target):
    for kernel, arguments, options in kernels(**VARIANTS[variant], target=target):
        stages = compile_offline(kernel, target, **options, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]
