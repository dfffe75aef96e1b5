from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specreg.capabilities import DraftLogitsLayout
from specreg.errors import ConfigError
from specreg.memory import (
    GIB,
    draft_logits_size,
    dtype_bytes,
    kv_bytes_per_token,
    kv_cache_gain_percent,
)
from specreg.ownership import rows_per_rank

DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout
LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def size(layout=DENSE, **changes):
    facts = {
        "rows": 64,
        "num_speculative_tokens": 7,
        "vocab_size": 1000,
        "dtype": "bfloat16",
        "draft_vocab_size": 100,
        "num_candidates": 8,
    }
    return draft_logits_size(layout, **(facts | changes))


@given(
    max_num_seqs=st.sampled_from([1, 3, 6, 256]),
    tp_size=st.sampled_from([1, 2, 4]),
    k=st.integers(1, 16),
    vocab_size=st.integers(1, 300_000),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_a_dense_cache_takes_rows_times_steps_times_vocabulary(
    max_num_seqs, tp_size, k, vocab_size, dtype
):
    rows = -(-max_num_seqs // tp_size)
    cache = draft_logits_size(
        DENSE,
        rows=rows_per_rank(max_num_seqs, tp_size),
        num_speculative_tokens=k,
        vocab_size=vocab_size,
        dtype=dtype,
    )
    assert cache.shape == (rows, k, vocab_size)
    assert cache.logits_bytes == rows * k * vocab_size * dtype_bytes(dtype)
    assert cache.side_bytes == rows * k * 8 + (rows + 1) * k
    assert cache.total_bytes == cache.logits_bytes + cache.side_bytes


def test_known_sizes_of_a_dense_cache():
    def gib(rows, k, vocab_size, dtype):
        cache = size(
            rows=rows,
            num_speculative_tokens=k,
            vocab_size=vocab_size,
            dtype=dtype,
            num_candidates=None,
        )
        return round(cache.logits_bytes / GIB, 2)

    assert gib(256, 7, 151_936, "float32") == 1.01
    assert gib(256, 7, 151_936, "bfloat16") == 0.51
    assert gib(64, 7, 151_936, "float32") == 0.25
    assert gib(64, 7, 151_936, "bfloat16") == 0.13
    assert gib(1024, 5, 154_880, "float32") == 2.95


def test_a_reduced_vocabulary_stores_its_own_columns_and_one_table():
    reduced, full = size(DRAFT_VOCAB, num_candidates=None), size(DENSE, num_candidates=None)
    assert reduced.shape == (64, 7, 100)
    assert reduced.logits_bytes * 10 == full.logits_bytes
    assert reduced.side_bytes == full.side_bytes + 4 * 1000


def test_candidates_store_fp32_scores_and_int32_ids():
    cache = size(TOP_K)
    assert (cache.shape, cache.dtype) == ((64, 7, 8), "float32")
    assert cache.logits_bytes == 64 * 7 * 8 * 4
    assert cache.side_bytes == size(DENSE, num_candidates=None).side_bytes + 64 * 7 * 8 * 4


def test_a_dense_cache_of_candidates_is_fp32_and_keeps_the_ids_that_it_must_clear():
    assert size().side_bytes - size(num_candidates=None).side_bytes == 64 * 7 * 8 * 4
    assert (size().dtype, size(num_candidates=None).dtype) == ("float32", "bfloat16")


def test_candidates_change_nothing_of_a_reduced_vocabularys_columns():
    assert size(DRAFT_VOCAB) == size(DRAFT_VOCAB, num_candidates=None)


@pytest.mark.parametrize(
    ("layout", "missing"), [(DRAFT_VOCAB, "draft_vocab_size"), (TOP_K, "num_candidates")]
)
def test_a_layout_without_its_width_is_refused(layout, missing):
    with pytest.raises(ConfigError, match=rf"cannot be sized[\s\S]*{missing}"):
        size(layout, **{missing: None})


def test_an_element_type_without_a_size_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        dtype_bytes("bfloat")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * 30 * 3 * 64 * 2),
        ({"head_dim": 128}, 2 * 30 * 3 * 128 * 2),
        ({"num_key_value_heads": None}, 2 * 30 * 9 * 64 * 2),
        ({"layer_types": ["full_attention", "sliding_attention"] * 15}, 2 * 30 * 3 * 64 * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 15}, None),
        ({"kv_lora_rank": 512}, None),
        ({"global_head_dim": 512}, None),
        ({"num_hidden_layers": None}, None),
        ({"num_attention_heads": None, "num_key_value_heads": None}, None),
        ({"hidden_size": None}, None),
    ],
)
def test_kv_of_a_token_is_told_where_the_config_tells_it(changes, expected):
    assert kv_bytes_per_token(LLAMA | changes, "bfloat16") == expected


def test_the_gain_is_what_is_freed_over_what_there_is():
    assert kv_cache_gain_percent(GIB, 50 * GIB) == 2.0
