from __future__ import annotations

import json

import pytest
from fake_distributions import PLUGIN, install

from specreg import registry
from specreg.cli import main

JSON_KEYS = [
    "method",
    "speculator",
    "distribution",
    "num_shards",
    "rows_per_rank",
    "layout",
    "dtype",
    "shape",
    "bytes_per_rank",
    "side_bytes_per_rank",
    "replicated_bytes_per_rank",
    "freed_bytes_per_rank",
    "provisional",
    "verdicts",
    "kv_cache_gain_percent",
]
SPECULATIVE = {"method": "planned", "num_speculative_tokens": 7, "model": "not/there"}
SPECULATIVE["draft_sample_method"] = "probabilistic"
FLAGS = ["-tp", "4", "--max-num-seqs", "256", "--enable-batch-sharded-sampling"]
SIZES = ["--vocab-size", "248320", "--dtype", "bfloat16"]
SAMPLERS = """
from specreg.plugin import DraftWatermarkerFactory, RejectionSamplerFactory

@hookimpl
def specreg_rejection_samplers():
    return [RejectionSamplerFactory("custom", "m:make")]

@hookimpl
def specreg_draft_watermarkers():
    return [DraftWatermarkerFactory("keyed", "m:make")]
"""


@pytest.fixture(autouse=True)
def planned(tmp_path, monkeypatch):
    """A distribution whose speculator `planned` honours the owner mask."""
    source = PLUGIN.replace(
        "supports_probabilistic=True", "supports_probabilistic=True, honors_owner_mask=True"
    ).replace("{name}", "planned")
    install(
        tmp_path / "site",
        "planned-dist",
        entry_points={"planned": "planned_plugin"},
        modules={"planned_plugin": source + SAMPLERS},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    registry.get_registry.cache_clear()
    yield
    registry.get_registry.cache_clear()


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    return caught.value.code or 0


def plan(capsys, *arguments, **speculative) -> dict:
    text = json.dumps(SPECULATIVE | speculative)
    assert run("--speculative-config", text, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_is_told_from_flags_alone(capsys):
    told = plan(capsys, *FLAGS, *SIZES, "--kv-cache-gib", "145.77")
    assert sorted(told) == sorted(JSON_KEYS)
    assert (told["method"], told["speculator"]) == ("planned", "planned")
    assert told["distribution"] == "planned-dist"
    assert (told["num_shards"], told["rows_per_rank"], told["layout"]) == (4, 64, "dense")
    assert (told["dtype"], told["shape"]) == ("bfloat16", [64, 7, 248320])
    assert told["bytes_per_rank"] == 64 * 7 * 248320 * 2
    assert told["freed_bytes_per_rank"] == 192 * 7 * 248320 * 2
    assert round(told["kv_cache_gain_percent"], 2) == 0.43
    assert told["provisional"] is True
    assert [sorted(verdict) for verdict in told["verdicts"]] == [["passed", "reason", "rule"]] * 5


def test_without_a_kv_cache_there_is_no_gain_to_tell(capsys):
    assert plan(capsys, *FLAGS, *SIZES)["kv_cache_gain_percent"] is None


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--draft-watermarker", "keyed"], "no-draft-watermarker"),
        (["--rejection-sampler", "custom"], "stock-rejection-sampler"),
        (["--max-num-seqs", "3"], "batch-sharded-sampling"),
        (["--tensor-parallel-size=1"], "batch-sharded-sampling"),
        (["--no-enable-batch-sharded-sampling"], "batch-sharded-sampling"),
    ],
)
def test_every_flag_reaches_the_policy(flags, rule, capsys):
    told = plan(capsys, *FLAGS, *SIZES, *flags)
    assert told["num_shards"] == 1
    assert [v["rule"] for v in told["verdicts"] if v["passed"] is False] == [rule]


def test_sharding_off_keeps_the_replicated_cache(capsys):
    told = plan(capsys, *FLAGS, *SIZES, "--draft-logits-sharding", "off")
    assert (told["num_shards"], told["freed_bytes_per_rank"]) == (1, 0)


@pytest.mark.parametrize("name", ["run.yaml", "run.json", "run.toml"])
def test_a_configuration_file_is_read_and_flags_win(name, tmp_path, capsys):
    run_config = {
        "yaml": "tensor_parallel_size: 2\nmax_num_seqs: 8\nvocab_size: 10\ndtype: float32\n"
        "speculative_config: {method: planned, num_speculative_tokens: 2}\n",
        "json": '{"tensor_parallel_size": 2, "max_num_seqs": 8, "vocab_size": 10, "dtype": '
        '"float32", "speculative": {"method": "planned", "num_speculative_tokens": 2}}',
        "toml": 'tensor_parallel_size = 2\nmax_num_seqs = 8\nvocab_size = 10\ndtype = "float32"\n'
        '[speculative_config]\nmethod = "planned"\nnum_speculative_tokens = 2\n',
    }
    path = tmp_path / name
    path.write_text(run_config[path.suffix[1:]])
    assert run(str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_rank"] == 0
    told = plan(capsys, str(path), "--enable-batch-sharded-sampling", "--vocab-size", "20")
    assert told["shape"] == [4, 7, 20]


def test_the_target_config_tells_sizes_and_tokens(tmp_path, capsys):
    target = {"vocab_size": 1000, "dtype": "float32", "num_hidden_layers": 2}
    target |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": target}))
    told = plan(capsys, *FLAGS, "--target-config", str(tmp_path))
    assert told["shape"] == [64, 7, 1000]
    token_bytes = 2 * 2 * 2 * 16 * 4
    assert told["kv_cache_gain_tokens"] == 192 * 7 * 1000 * 4 // token_bytes
    text = json.dumps(SPECULATIVE)
    flags = ["--speculative-config", text, *FLAGS, "--target-config", str(tmp_path / "config.json")]
    assert run(*flags, "--kv-cache-gib", "1") == 0
    shown = capsys.readouterr().out
    assert f"+{told['kv_cache_gain_tokens']} tokens" in shown
    assert "KV cache of 1 GiB a rank: +0.50%" in shown


def test_a_target_config_that_does_not_tell_the_kv_of_a_token_gives_no_tokens(tmp_path, capsys):
    for content in ({"vocab_size": 10}, {"vocab_size": 10, "dtype": "float32"}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        flags = ["--target-config", str(tmp_path)]
        told = plan(capsys, *flags, draft_sample_method="greedy")
        assert "kv_cache_gain_tokens" not in told


def test_a_sharding_that_is_required_and_impossible_lists_the_rules_and_fails(capsys):
    flags = ["--speculative-config", json.dumps(SPECULATIVE), *SIZES, "--max-num-seqs", "8"]
    assert run(*flags, "--draft-logits-sharding", "require") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: [policy]")
    assert "batch-sharded-sampling: enable_batch_sharded_sampling is off" in captured.err
    assert [line.split(":")[0].strip() for line in captured.err.splitlines()[1:]] == [
        "where",
        "got",
        "fix",
    ]


def test_with_json_an_error_is_an_object_too(capsys):
    assert run("--speculative-config", "{", "--json") == 1
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert sorted(error) == ["code", "fix", "got", "what", "where"]
    assert error["code"] == "config"
    assert error["what"] in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-config", "/nowhere"], "the target config is not there"),
        (["--kv-cache-gib", "0"], "--kv-cache-gib"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib"),
        (["--draft-logits-layout", "top_k"], "possible: dense"),
        (["--draft-logits-layout", "sparse"], "config.draft_logits_layout"),
        (["--draft-watermarker", "kyed"], "did you mean 'keyed'"),
        (["--dtype", "bf16"], "did you mean 'bfloat16'"),
        (["absent.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(flags, message, capsys):
    assert run("--speculative-config", json.dumps(SPECULATIVE), *FLAGS, *SIZES, *flags) == 1
    assert message in capsys.readouterr().err


def test_without_a_speculative_config_there_is_nothing_to_plan(capsys):
    assert run() == 1
    assert "there is no draft-logits cache to plan" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--max-num-seqs", "many"]])
def test_wrong_usage_exits_with_two(flags, capsys):
    assert run(*flags) == 2
    assert "Usage" in capsys.readouterr().err
