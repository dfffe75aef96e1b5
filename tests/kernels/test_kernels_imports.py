"""Ops need torch alone: neither the configuration's libraries nor Triton."""

import subprocess
import sys

SOURCE = """
import sys
for name in ("pydantic", "pluggy", "typer", "triton"):
    sys.modules[name] = None
import torch
from specreg.draft_sampler import DraftSampler
from specreg.kernels import draft_sample
slots = torch.arange(3)
args = (torch.eye(3), slots, slots * 0, slots, torch.zeros(3), slots, None)
assert draft_sample(*args, vocab_size=3).tolist() == [0, 1, 2]
"""


def test_ops_work_without_pydantic_pluggy_typer_and_triton():
    subprocess.run([sys.executable, "-c", SOURCE], check=True)


def test_importing_the_ops_does_not_import_triton():
    source = (
        "import sys, specreg.kernels, specreg.draft_sampler; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
