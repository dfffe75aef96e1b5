"""The target of a rank: its share of the head, and what it shows of its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specreg.errors import InternalError, PluginError
from specreg.ownership import Shard, cdiv
from specreg.runtime.kv_pool import PagedKVView
from specreg.runtime.target import Target
from specreg.speculator import KVRows
from specreg.testing.packed import PackedRequests
from specreg.testing.tiny_models import save_tiny_model

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

PROMPT = [7, 3, 9, 1, 4, 8, 2, 6, 5]


class OneProcess:
    """The collective of ranks that run one after the other: rank r's columns are put in by hand."""

    def __init__(self) -> None:
        self.columns: Sequence[Tensor] = ()
        self.num_calls = 0

    def all_gather_columns(self, local: Tensor) -> Tensor:
        self.num_calls += 1
        assert any(torch.equal(local, columns) for columns in self.columns)
        return torch.cat(list(self.columns), dim=-1)


def own_logits(directory: Path, prompt: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [("llama", 101), ("llama_tied", 101), ("llama", 10), ("gemma2", 101), ("granite", 101)],
)
def test_concatenated_shards_are_the_models_own_logits(
    kind: str, vocab_size: int, num_shards: int, tmp_path: Path
) -> None:
    save_tiny_model(kind, tmp_path, vocab_size=vocab_size)
    expected = own_logits(tmp_path, PROMPT)
    group = OneProcess()
    ranks = [
        Target.load(tmp_path, shard=Shard(num_shards, rank), collectives=group)
        for rank in range(num_shards)
    ]
    states = [PackedRequests(rank, 1).step([(0, 0, PROMPT)])[0].hidden for rank in ranks]
    local = [rank.compute_logits_local(state) for rank, state in zip(ranks, states, strict=True)]
    width = cdiv(vocab_size, num_shards)
    for rank, columns in enumerate(local):
        assert columns.shape == (len(PROMPT), width)
        mine = expected[:, rank * width : (rank + 1) * width]
        assert torch.allclose(columns[:, : mine.shape[1]], mine, atol=1e-4)
        assert torch.isneginf(columns[:, mine.shape[1] :]).all()
    group.columns = local
    for rank, state in zip(ranks, states, strict=True):
        logits = rank.compute_logits(state)
        assert logits.shape == (len(PROMPT), vocab_size)
        assert (logits - expected).abs().max() < 1e-4
    assert group.num_calls == (num_shards if num_shards > 1 else 0)


def test_a_rank_keeps_only_its_rows_of_an_untied_head(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    whole = Target.load(tmp_path)
    part = Target.load(tmp_path, shard=Shard(4, 3), collectives=OneProcess())
    row_bytes = 32 * 4
    assert whole.weight_bytes - part.weight_bytes == (101 - 23) * row_bytes
    assert part._decoder.head.weight.untyped_storage().nbytes() == 23 * row_bytes


def test_a_tied_head_stays_the_embeddings_memory(tmp_path: Path) -> None:
    save_tiny_model("llama_tied", tmp_path)
    whole = Target.load(tmp_path)
    part = Target.load(tmp_path, shard=Shard(4, 1), collectives=OneProcess())
    assert part.weight_bytes == whole.weight_bytes
    embedding = part.embed(torch.arange(101))
    assert torch.equal(part._decoder.head.weight, embedding[26:52])


def test_a_sharded_target_without_a_collective_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(InternalError, match="no way to complete its logits"):
        Target.load(tmp_path, shard=Shard(2, 0))


def test_the_view_of_a_layer_reads_the_targets_own_keys_and_refuses_to_write(
    tmp_path: Path,
) -> None:
    save_tiny_model("gemma3", tmp_path)
    target = Target.load(tmp_path)
    with pytest.raises(InternalError, match="no keys and values yet"):
        target.kv(0)
    requests = PackedRequests(target, 2)
    assert isinstance(requests.kv, PagedKVView)
    target.attach_kv(requests.kv)
    requests.step([(1, 0, PROMPT)])
    rows = KVRows.causal(torch.tensor([1]), torch.tensor([len(PROMPT) - 1]))
    query = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    view = target.kv(2)
    seen = view.attend(0, query, rows, scale=0.4)
    assert torch.equal(seen, requests.kv.attend(2, query, rows, scale=0.4))
    assert not torch.equal(seen, target.kv(1).attend(0, query, rows, scale=0.4))
    with pytest.raises(PluginError, match="cannot be written"):
        view.write(0, rows, query[:, :2], query[:, :2])
    with pytest.raises(IndexError):
        view.attend(1, query, rows, scale=0.4)


def test_the_facts_a_speculator_asks_for_are_the_configs(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path, dtype=torch.bfloat16)
    target = Target.load(tmp_path)
    assert target.config["model_type"] == "qwen3"
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (101, 32, 4)
    assert (target.dtype, target.device.type) == (torch.bfloat16, "cpu")
    assert target.max_model_len == 256
    assert target.generation_config is not None
    assert target.generation_config["eos_token_id"] == 2
    assert Target.load(tmp_path, dtype="float32").dtype == torch.float32
