"""examples/specreg-example, from its sources to a run that its user would start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fresh_environment import FreshEnvironment, build_wheel

from specreg.cli import main
from specreg.testing.tiny_models import save_tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "specreg-example"
SPECULATIVE = {
    "method": "suffix_counts",
    "num_speculative_tokens": 3,
    "draft_sample_method": "probabilistic",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    made = FreshEnvironment(tmp_path_factory.mktemp("venv"))
    made.install(build_wheel(EXAMPLE, tmp_path_factory.mktemp("wheel")))
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Greedy decoding of these weights repeats itself, which is what the example is good at.
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("target"), seed=4))


def test_the_installed_wheel_is_listed_beside_the_built_ins(environment):
    listing = environment.specreg_json("list")
    assert listing["broken"] == []
    found = {entry["name"]: entry for entry in listing["speculators"]}
    example = found["suffix_counts"]
    assert (example["distribution"], example["version"]) == ("specreg-example", "0.1.0")
    assert example["capabilities"]["honors_owner_mask"] is True
    assert "specreg" in {entry["distribution"] for entry in listing["speculators"]}


def test_it_is_selected_by_configuration_alone_and_changes_no_token(environment, target, capsys):
    run = ("generate", "--target", target, "--prompt", "abcabcabcab", "--max-tokens", "28")
    run += ("--max-model-len", "64")
    with pytest.raises(SystemExit, match="0"):
        main([*run, "--json"])
    plain = json.loads(capsys.readouterr().out)
    sharded = ("-tp", "2", "--enable-batch-sharded-sampling", "--draft-logits-sharding", "require")
    speculative = ("--speculative-config", json.dumps(SPECULATIVE | {"unseen_mass": 0.25}))
    answer = environment.specreg_json(*run, *sharded, *speculative)
    assert answer["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert answer["plan"]["distribution"] == "specreg-example"
    assert answer["plan"]["num_shards"] == 2
    assert answer["stats"]["num_accepted_tokens"] > 0


def test_a_wrong_option_is_refused_in_four_parts(environment):
    refused = environment.specreg(
        *("plan", "--vocab-size", "100", "--dtype", "float32", "--speculative-config"),
        json.dumps(SPECULATIVE | {"unseen_mas": 1.0}),
    )
    assert refused.returncode == 1
    assert "'unseen_mass'" in refused.stderr


def test_every_promise_of_it_is_kept(environment):
    answer = environment.specreg_json("check", "suffix_counts", "--tp", "1", "--tp", "2")
    assert answer["is_ok"] is True
    assert {check["status"] for check in answer["checks"]} == {"proven"}


def test_its_own_tests_pass(environment):
    """Of the kit, which has just been run, one group."""
    done = environment.pytest(EXAMPLE / "tests", "-k", "drafts or protocol")
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* passed", done.stdout)
