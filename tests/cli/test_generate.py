"""`specreg generate`, from the command line to JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specreg.cli import main
from specreg.testing.tiny_models import save_tiny_model

STATS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_length",
    "acceptance_per_position",
    "draft_logits_bytes_per_rank",
    "num_kv_blocks",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("model")))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def draft(model: str, **keys: Any) -> str:
    return json.dumps(
        {"method": "draft_model", "model": model, "num_speculative_tokens": 2, **keys}
    )


def test_a_prompt_file_gives_an_output_a_line_with_plan_and_stats(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n"two"\n')
    answer = run_json(
        capsys,
        *("--target", model, "--prompts", str(prompts), "--max-tokens", "5"),
        *("--max-model-len", "64", "--temperature", "0.7", "--seed", "3"),
        *("--speculative-config", draft(model, draft_sample_method="probabilistic")),
    )
    assert set(answer) == {"outputs", "plan", "stats"}
    assert [output["prompt"] for output in answer["outputs"]] == ["one", "two"]
    for output in answer["outputs"]:
        assert set(output) == {"prompt", "text", "token_ids", "finish_reason"}
        assert len(output["token_ids"]) <= 5
    assert set(answer["stats"]) == STATS
    assert answer["stats"]["draft_logits_bytes_per_rank"] == answer["plan"]["bytes_per_rank"] > 0
    assert answer["plan"]["method"] == "draft_model"
    assert answer["plan"]["provisional"] is False


def test_without_a_speculative_config_there_is_no_plan(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    answer = run_json(capsys, "--target", model, "--max-tokens", "2", "--max-model-len", "64")
    assert answer["plan"] is None
    assert answer["stats"]["num_drafts"] == 0


def test_two_ranks_share_the_cache(capsys: pytest.CaptureFixture[str], model: str) -> None:
    answer = run_json(
        capsys,
        *("--target", model, "--max-tokens", "4", "--max-model-len", "64", "-tp", "2"),
        "--enable-batch-sharded-sampling",
        *("--speculative-config", draft(model, draft_sample_method="probabilistic")),
    )
    plan = answer["plan"]
    assert (plan["num_shards"], plan["rows_per_rank"]) == (2, 4)
    assert plan["bytes_per_rank"] * 2 == plan["replicated_bytes_per_rank"]


def test_in_words_it_prints_the_text_and_what_the_cache_took(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    code, out, _ = run(
        capsys,
        *("--target", model, "--prompt", "[bold]abc", "--max-tokens", "3"),
        *("--max-model-len", "64", "--speculative-config", draft(model)),
    )
    assert code == 0
    assert "[bold]abc" in out
    assert "acceptance length" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--target", "no/such/model"), "checkpoint", "there is no such model"),
        (("--speculative-config", '{"method": "draft_modle", "model": "x"}'), None, "draft_model"),
        (("--prompt", "a", "--prompts", "b"), "config", "given twice"),
        (("--prompts", "absent.jsonl"), "admission", "cannot be read"),
        (("--temperature", "-1"), "admission", "temperature"),
    ],
)
def test_an_error_is_told_in_four_parts_and_as_json(
    capsys: pytest.CaptureFixture[str],
    model: str,
    arguments: tuple[str, ...],
    code: str | None,
    message: str,
) -> None:
    target = () if "--target" in arguments else ("--target", model)
    status, out, err = run(capsys, *target, *arguments, "--json")
    error = json.loads(out)["error"]
    assert status == 1
    assert code is None or error["code"] == code
    assert set(error) == {"code", "what", "where", "got", "fix"}
    assert message in err
    assert all(f"{part}:" in err for part in ("where", "got", "fix"))
