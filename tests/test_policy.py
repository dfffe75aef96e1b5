from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_plugins import ToyPlugin, capabilities, spec

from specreg import policy
from specreg.capabilities import CacheDtype, DraftLogitsLayout
from specreg.config import EngineConfig
from specreg.errors import ConfigError, InternalError, PluginError, PolicyError
from specreg.memory import GIB, draft_logits_size, kv_cache_gain_percent
from specreg.plugin import DraftWatermarkerFactory, PolicyRule, RejectionSamplerFactory
from specreg.policy import batch_sharded_sampling_enabled, finalize, resolve
from specreg.registry import Registry

DENSE, DRAFT_VOCAB, TOP_K = DraftLogitsLayout
RULES = [
    "probabilistic-drafts",
    "batch-sharded-sampling",
    "speculator-opts-in",
    "no-draft-watermarker",
    "stock-rejection-sampler",
]
SPECS = [
    spec(),
    spec("argmax_only", capabilities=capabilities(supports_probabilistic=False)),
    spec("unmasked", capabilities=capabilities(honors_owner_mask=False)),
    spec("fp32", capabilities=capabilities(cache_dtype=CacheDtype.FLOAT32)),
    spec(
        "reduced",
        capabilities=capabilities(layouts=frozenset({DENSE, DRAFT_VOCAB}), draft_vocab_size=32_000),
    ),
    spec(
        "candidates",
        capabilities=capabilities(
            layouts=frozenset({DENSE, TOP_K}), num_candidates=16, cache_dtype=CacheDtype.FLOAT32
        ),
    ),
    spec("only_top_k", capabilities=capabilities(layouts=frozenset({TOP_K}), num_candidates=16)),
    spec(
        "unsized",
        capabilities=capabilities(layouts=frozenset(DraftLogitsLayout)),
    ),
]
ALL_LAYOUTS = frozenset(DraftLogitsLayout)
REGISTRY = Registry.from_plugins(
    [
        ToyPlugin(
            *SPECS,
            rejection_samplers=[
                RejectionSamplerFactory("undeclared", "m:make"),
                RejectionSamplerFactory(
                    "declared",
                    "m:make",
                    accepts_sharded_draft_logits=True,
                    reads_layouts=ALL_LAYOUTS,
                ),
            ],
            draft_watermarkers=[
                DraftWatermarkerFactory("unmasked", "m:make"),
                DraftWatermarkerFactory("masked", "m:make", honors_owner_mask=True),
            ],
        )
    ]
)


def config(method="toy", k=7, greedy=False, **changes) -> EngineConfig:
    """A run on four ranks in which every rule holds, but for `changes`."""
    sampling = "greedy" if greedy else "probabilistic"
    facts = {
        "speculative": {
            "method": method,
            "num_speculative_tokens": k,
            "draft_sample_method": sampling,
        },
        "tensor_parallel_size": 4,
        "max_num_seqs": 256,
        "enable_batch_sharded_sampling": True,
        "vocab_size": 1000,
        "dtype": "bfloat16",
    }
    return EngineConfig.parse(facts | changes)


def plan_of(*arguments, registry=REGISTRY, **changes):
    return resolve(config(*arguments, **changes), registry)


def verdicts(plan) -> dict[str, bool | None]:
    return {verdict.rule: verdict.passed for verdict in plan.verdicts}


class Target(SimpleNamespace):
    def compute_logits_local(self, hidden_states):
        raise AssertionError("planning does not compute")


def loaded(plan, *, target=None, opts_in=True, sampler=None, **arguments):
    """`finalize` with loaded parts that let every rule hold, but for what is passed."""
    return finalize(
        plan,
        target or Target(vocab_size=1000, dtype="torch.bfloat16"),
        SimpleNamespace(supports_batch_sharded_draft_logits=lambda: opts_in),
        sampler or SimpleNamespace(accepts_sharded_draft_logits=True, reads_layouts=ALL_LAYOUTS),
        **arguments,
    )


class TestThePublishedTable:
    """Four ranks, 256 requests, probabilistic drafts: GiB a rank and the gain of the KV cache."""

    ROWS = (
        # vocabulary, K, speculator, GiB replicated, GiB sharded, GiB of KV, gain in percent
        (129_280, 5, "toy", 0.31, 0.08, 74.44, 0.31),
        (248_320, 3, "toy", 0.36, 0.09, 150.69, 0.18),
        (248_320, 7, "toy", 0.83, 0.21, 145.77, 0.43),
        (248_320, 7, "candidates", 1.66, 0.41, 147.07, 0.85),
    )

    @pytest.mark.parametrize(("vocab_size", "k", "method", "before", "after", "kv", "gain"), ROWS)
    def test_is_reproduced(self, vocab_size, k, method, before, after, kv, gain):
        plan = plan_of(method, k=k, vocab_size=vocab_size, draft_logits_layout="dense")
        assert plan.num_shards == 4
        assert round(plan.replicated_bytes_per_rank / GIB, 2) == before
        assert round(plan.bytes_per_rank / GIB, 2) == after
        assert round(kv_cache_gain_percent(plan.freed_bytes_per_rank, kv * GIB), 2) == gain


class TestRules:
    def test_that_loading_decides_are_open_and_the_plan_is_provisional(self):
        plan = plan_of()
        assert list(verdicts(plan)) == RULES
        assert verdicts(plan) == dict(zip(RULES, [True, None, None, True, True], strict=True))
        reasons = {verdict.rule: verdict.reason for verdict in plan.verdicts}
        assert "compute_logits_local" in reasons["batch-sharded-sampling"]
        assert "supports_batch_sharded_draft_logits" in reasons["speculator-opts-in"]
        assert plan.provisional
        assert (plan.num_shards, plan.rows_per_rank, plan.shape) == (4, 64, (64, 7, 1000))

    @pytest.mark.parametrize(
        ("arguments", "failing"),
        [
            ({"enable_batch_sharded_sampling": False}, "batch-sharded-sampling"),
            ({"tensor_parallel_size": 1}, "batch-sharded-sampling"),
            ({"max_num_seqs": 3}, "batch-sharded-sampling"),
            ({"method": "unmasked"}, "speculator-opts-in"),
            ({"draft_watermarker": "unmasked"}, "no-draft-watermarker"),
            ({"rejection_sampler": "undeclared"}, "stock-rejection-sampler"),
        ],
    )
    def test_each_can_keep_the_cache_replicated(self, arguments, failing):
        plan = plan_of(**arguments)
        assert [v.rule for v in plan.failed_verdicts] == [failing]
        assert (plan.num_shards, plan.rows_per_rank) == (1, plan.max_num_seqs)
        assert plan.bytes_per_rank == plan.replicated_bytes_per_rank > 0
        with pytest.raises(PolicyError, match=rf"where: {failing}\n"):
            plan_of(**arguments, draft_logits_sharding="require")

    @pytest.mark.parametrize(
        "arguments",
        [
            {"draft_watermarker": "masked"},
            {"rejection_sampler": "declared"},
            {"max_num_seqs": 4},
            {"max_num_seqs": 7},
            {"draft_logits_sharding": "require"},
        ],
    )
    def test_hold_where_what_they_ask_for_is_declared(self, arguments):
        plan = plan_of(**arguments)
        assert plan.failed_verdicts == ()
        assert (plan.num_shards, plan.rows_per_rank) == (4, -(-plan.max_num_seqs // 4))

    def test_that_failed_are_all_listed_when_sharding_is_required(self):
        arguments = {
            "method": "unmasked",
            "enable_batch_sharded_sampling": False,
            "draft_watermarker": "unmasked",
            "rejection_sampler": "undeclared",
            "greedy": True,
        }
        with pytest.raises(PolicyError) as caught:
            plan_of(**arguments, draft_logits_sharding="require")
        assert caught.value.where == ", ".join(RULES)
        assert all(f"{rule}: " in caught.value.got for rule in RULES)

    def test_do_not_matter_when_sharding_is_off(self):
        plan = plan_of(draft_logits_sharding="off")
        assert plan.failed_verdicts == ()
        assert (plan.num_shards, plan.freed_bytes_per_rank) == (1, 0)
        assert "draft_logits_sharding is off" in plan.explain()


@pytest.mark.parametrize("arguments", [{"greedy": True}, {"method": "argmax_only"}])
def test_without_probabilistic_drafts_there_is_no_cache(arguments):
    plan = plan_of(**arguments, vocab_size=None, dtype="auto")
    assert verdicts(plan)["probabilistic-drafts"] is False
    assert not plan.has_cache
    assert (plan.num_shards, plan.rows_per_rank, plan.layout, plan.dtype) == (1, 0, None, None)
    assert (plan.shape, plan.bytes_per_rank, plan.side_bytes_per_rank) == ((), 0, 0)
    assert (plan.replicated_bytes_per_rank, dict(plan.possible_layouts)) == (0, {})
    assert "no draft-logits cache" in plan.explain()


class TestRulesOfPlugins:
    def registry(self, evaluate):
        rule = PolicyRule("quota", evaluate)
        return Registry.from_plugins([ToyPlugin(spec()), ToyPlugin(name="other", rules=[rule])])

    @pytest.mark.parametrize(("passed", "num_shards"), [(True, 4), (None, 4), (False, 1)])
    def test_come_after_those_of_the_core_and_count_alike(self, passed, num_shards):
        plan = plan_of(registry=self.registry(lambda inputs: (passed, "as it is")))
        assert plan.verdicts[-1] == ("quota", passed, "as it is")
        assert plan.num_shards == num_shards

    def test_see_the_run_and_later_what_was_loaded(self):
        seen = []

        def evaluate(inputs):
            seen.append((inputs.config.speculative.num_speculative_tokens, inputs.loaded is None))
            return True, "ok"

        loaded(plan_of(registry=self.registry(evaluate)))
        assert seen == [(7, True), (7, False)]

    def test_that_fail_end_the_planning_with_their_name(self):
        with pytest.raises(PluginError, match="policy rule 'quota' failed"):
            plan_of(registry=self.registry(lambda inputs: 1 / 0))


class TestLayouts:
    def test_auto_takes_the_smallest_that_is_written_and_read(self):
        assert plan_of().layout is DENSE
        assert plan_of("reduced", vocab_size=248_320).layout is DRAFT_VOCAB
        assert plan_of("candidates").layout is TOP_K
        assert plan_of("candidates", rejection_sampler="declared").layout is TOP_K
        assert plan_of("candidates", rejection_sampler="undeclared").layout is DENSE

    def test_auto_counts_what_lies_beside_the_logits(self):
        # For four requests the table of a reduced vocabulary weighs more than it saves.
        assert plan_of("reduced", max_num_seqs=4, vocab_size=33_000, k=1).layout is DENSE

    def test_a_layout_whose_width_is_not_declared_is_not_possible(self):
        assert set(plan_of("unsized").possible_layouts) == {DENSE}

    def test_every_possible_one_is_told_with_its_size(self):
        plan = plan_of("candidates")
        assert set(plan.possible_layouts) == {DENSE, TOP_K}
        for layout, size in plan.possible_layouts.items():
            named = plan_of("candidates", draft_logits_layout=layout.value)
            assert (named.layout, named.shape, named.dtype) == (layout, size.shape, size.dtype)
            assert named.bytes_per_rank == size.logits_bytes
            assert named.side_bytes_per_rank == size.side_bytes
        assert "also possible: layout dense" in plan.explain()

    @pytest.mark.parametrize(
        ("arguments", "possible"),
        [
            ({"draft_logits_layout": "top_k"}, "possible: dense"),
            ({"method": "candidates", "draft_logits_layout": "draft_vocab"}, "dense, top_k"),
            (
                {
                    "method": "candidates",
                    "draft_logits_layout": "top_k",
                    "rejection_sampler": "undeclared",
                },
                r"possible: dense \(",
            ),
            ({"method": "only_top_k", "rejection_sampler": "undeclared"}, "possible: none"),
        ],
    )
    def test_one_that_is_not_possible_is_an_error_that_names_what_is(self, arguments, possible):
        with pytest.raises(PolicyError, match=possible):
            plan_of(**arguments)

    def test_a_candidate_layout_stores_fp32_scores(self):
        assert plan_of("only_top_k").dtype == "float32"

    def test_a_speculator_may_store_fp32_whatever_the_run_computes_in(self):
        assert plan_of("fp32").dtype == "float32"
        assert plan_of("fp32").bytes_per_rank == 2 * plan_of().bytes_per_rank


@given(
    max_num_seqs=st.sampled_from([1, 3, 6, 256]),
    tp_size=st.sampled_from([1, 2, 3, 4]),
    k=st.integers(1, 9),
    vocab_size=st.integers(1, 10_000),
    is_enabled=st.booleans(),
)
def test_bytes_are_rows_times_steps_times_vocabulary_for_any_run(
    max_num_seqs, tp_size, k, vocab_size, is_enabled
):
    plan = plan_of(
        k=k,
        vocab_size=vocab_size,
        max_num_seqs=max_num_seqs,
        tensor_parallel_size=tp_size,
        enable_batch_sharded_sampling=is_enabled,
    )
    is_sharded = is_enabled and 1 < tp_size <= max_num_seqs
    assert plan.num_shards == (tp_size if is_sharded else 1)
    rows = -(-max_num_seqs // plan.num_shards)
    assert plan.bytes_per_rank == rows * k * vocab_size * 2
    assert plan.replicated_bytes_per_rank == max_num_seqs * k * vocab_size * 2
    size = draft_logits_size(
        DENSE, rows=rows, num_speculative_tokens=k, vocab_size=vocab_size, dtype="bfloat16"
    )
    assert plan.side_bytes_per_rank == size.side_bytes


class TestTheTarget:
    def write(self, tmp_path, data) -> str:
        (tmp_path / "config.json").write_text(json.dumps(data))
        return str(tmp_path)

    @pytest.mark.parametrize(
        "data",
        [
            {"vocab_size": 320, "dtype": "float16"},
            {"vocab_size": 320, "torch_dtype": "float16"},
            {"text_config": {"vocab_size": 320}, "torch_dtype": "torch.float16"},
            {"text_config": {"vocab_size": 320, "dtype": "float16"}, "vocab_size": 5},
        ],
    )
    def test_tells_vocabulary_and_dtype(self, data, tmp_path):
        target = self.write(tmp_path, data)
        for name in (target, f"{target}/config.json"):
            plan = plan_of(target=name, vocab_size=None, dtype="auto")
            assert (plan.vocab_size, plan.dtype) == (320, "float16")

    def test_is_overridden_by_the_configuration(self, tmp_path):
        target = self.write(tmp_path, {"vocab_size": 320, "dtype": "float16"})
        plan = plan_of(target=target, vocab_size=640, dtype="float32")
        assert (plan.vocab_size, plan.dtype) == (640, "float32")

    def test_may_be_a_known_name(self):
        plan = plan_of(target="smollm2-135m-instruct", vocab_size=None, dtype="auto")
        assert (plan.vocab_size, plan.dtype) == (49_152, "float32")

    @pytest.mark.parametrize(
        ("changes", "flag"),
        [({"vocab_size": None}, "--vocab-size"), ({"dtype": "auto"}, "--dtype")],
    )
    def test_that_is_not_there_leaves_it_to_the_flags(self, changes, flag):
        assert plan_of(target="/nowhere").vocab_size == 1000
        with pytest.raises(ConfigError, match=f"pass {flag}"):
            plan_of(target="/nowhere", **changes)

    def test_of_a_dtype_without_a_size_is_refused(self, tmp_path):
        target = self.write(tmp_path, {"vocab_size": 320, "dtype": "float8_e4m3fn"})
        with pytest.raises(ConfigError, match="float8_e4m3fn"):
            plan_of(target=target, dtype="auto")


def test_the_draft_config_decides_what_the_speculator_can(tmp_path):
    def facts(setup):
        size = setup.draft_config.get("draft_vocab_size")
        return capabilities(layouts=frozenset({DENSE, DRAFT_VOCAB}), draft_vocab_size=size)

    registry = Registry.from_plugins([ToyPlugin(spec(capabilities=facts))])
    (tmp_path / "config.json").write_text('{"draft_vocab_size": 10, "n_predict": 2}')
    speculative = {"method": "toy", "draft_sample_method": "probabilistic"}
    for model, layout in ((str(tmp_path), DRAFT_VOCAB), ("absent", DENSE)):
        k = None if layout is DRAFT_VOCAB else 2
        keys = speculative | {"model": model, "num_speculative_tokens": k}
        plan = plan_of(speculative=keys, registry=registry, vocab_size=50_000)
        assert (plan.layout, plan.num_speculative_tokens) == (layout, 2)


def test_a_run_without_speculation_has_nothing_to_plan():
    with pytest.raises(ConfigError, match="there is no draft-logits cache to plan"):
        resolve(EngineConfig(), REGISTRY)


class TestFinalize:
    def test_decides_every_rule(self):
        plan = loaded(plan_of(), shard_idx=3)
        assert verdicts(plan) == dict.fromkeys(RULES, True)
        assert not plan.provisional
        assert (plan.num_shards, plan.shard_idx, plan.rows_per_rank) == (4, 3, 64)

    @pytest.mark.parametrize(
        ("parts", "failing"),
        [
            (
                {"target": SimpleNamespace(vocab_size=1000, dtype="torch.bfloat16")},
                "batch-sharded-sampling",
            ),
            ({"opts_in": False}, "speculator-opts-in"),
            ({"sampler": SimpleNamespace()}, "stock-rejection-sampler"),
        ],
    )
    def test_keeps_the_cache_replicated_when_a_loaded_part_says_no(self, parts, failing):
        plan = loaded(plan_of(), shard_idx=2, **parts)
        assert [v.rule for v in plan.failed_verdicts] == [failing]
        assert (plan.num_shards, plan.shard_idx, plan.rows_per_rank) == (1, 0, 256)
        with pytest.raises(PolicyError, match=f"where: {failing}"):
            loaded(plan_of(draft_logits_sharding="require"), **parts)

    def test_believes_the_declaration_over_the_loaded_speculator(self):
        assert loaded(plan_of("unmasked"), opts_in=True).num_shards == 1

    def test_lets_one_rank_keep_all_ranks_from_sharding(self):
        asked = []

        def all_ranks_agree(passed):
            asked.append(passed)
            return passed and len(asked) != 3

        plan = loaded(plan_of(), all_ranks_agree=all_ranks_agree)
        assert asked == [True] * len(RULES)
        assert plan.num_shards == 1
        assert plan.failed_verdicts == (("speculator-opts-in", False, "another rank answered no"),)

    def test_asks_the_other_ranks_about_every_rule_even_after_one_failed(self):
        asked = []
        loaded(plan_of(), opts_in=False, all_ranks_agree=lambda passed: asked.append(passed))
        assert len(asked) == len(RULES)

    def test_takes_vocabulary_and_dtype_from_the_loaded_target(self):
        provisional = plan_of(target="smollm2-135m-instruct", vocab_size=None, dtype="auto")
        plan = loaded(provisional, target=Target(vocab_size=49_280, dtype="torch.float16"))
        assert (plan.vocab_size, plan.dtype, plan.shape[-1]) == (49_280, "float16", 49_280)

    def test_refuses_a_target_of_another_vocabulary_than_was_configured(self):
        with pytest.raises(ConfigError, match="1000; allowed: 1001"):
            loaded(plan_of(), target=Target(vocab_size=1001, dtype="torch.bfloat16"))

    def test_takes_a_layout_that_the_loaded_sampler_reads(self):
        sampler = SimpleNamespace(accepts_sharded_draft_logits=True)
        assert loaded(plan_of("candidates"), sampler=sampler).layout is DENSE
        named = plan_of("candidates", draft_logits_layout="top_k")
        with pytest.raises(PolicyError, match="'top_k' is not possible"):
            loaded(named, sampler=sampler)

    def test_never_shards_the_cache_where_sampling_is_not_sharded(self, monkeypatch):
        monkeypatch.setattr(policy, "batch_sharded_sampling_enabled", lambda *_: False)
        with pytest.raises(InternalError, match="without batch-sharded sampling"):
            loaded(plan_of())


def test_batch_sharded_sampling_is_decided_by_one_function():
    target = Target()
    assert batch_sharded_sampling_enabled(config()) is None
    assert batch_sharded_sampling_enabled(config(), target) is True
    assert batch_sharded_sampling_enabled(config(), SimpleNamespace()) is False
    assert batch_sharded_sampling_enabled(config(max_num_seqs=3), target) is False
    assert batch_sharded_sampling_enabled(config(tensor_parallel_size=1), target) is False
    assert batch_sharded_sampling_enabled(EngineConfig(), target) is False


def test_a_plan_tells_a_line_a_rule_and_what_it_weighs():
    plan = plan_of(vocab_size=248_320)
    lines = plan.explain().splitlines()
    assert lines[0] == "provisional plan of toy (toy-dist), method toy"
    assert [line.split()[0] for line in lines[1:6]] == RULES
    assert [line.split()[1] for line in lines[1:6]] == ["yes", "at", "at", "yes", "yes"]
    assert "sharded over 4 ranks: 64 rows a rank for 256 requests" in lines[6]
    assert "dense, bfloat16 [64, 7, 248320]: 0.21 GiB a rank" in lines[7]
    assert "replicated it would be 0.83 GiB: 0.62 GiB a rank are freed" in lines[8]
    assert loaded(plan_of(), opts_in=False).explain().startswith("final plan")


def test_a_plan_as_json_holds_plain_values():
    plan = plan_of()
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["layout"] == "dense"
    assert told["shape"] == [64, 7, 1000]
    assert told["verdicts"][1]["passed"] is None
    assert told["freed_bytes_per_rank"] == plan.freed_bytes_per_rank == 192 * 7 * 1000 * 2
    assert json.loads(json.dumps(plan_of(greedy=True).to_dict()))["layout"] is None


def test_a_speculator_that_opts_out_when_loaded_says_why():
    sampler = SimpleNamespace(accepts_sharded_draft_logits=True, reads_layouts=ALL_LAYOUTS)
    withdrawn = SimpleNamespace(
        supports_batch_sharded_draft_logits=lambda: False, opt_out_reason="sampler odd lies"
    )
    target = Target(vocab_size=1000, dtype="torch.bfloat16")
    plan = finalize(plan_of(), target, withdrawn, sampler)
    (verdict,) = (v for v in plan.verdicts if v.rule == "speculator-opts-in")
    assert verdict.reason.endswith("of speculator toy is False: sampler odd lies")
