from __future__ import annotations

import itertools

import pytest
from pydantic import BaseModel, ConfigDict
from toy_plugins import ToyPlugin, capabilities, spec

from specreg.capabilities import DraftingStyle
from specreg.config import SpeculativeConfig
from specreg.errors import (
    AmbiguousSpeculatorError,
    BrokenPluginError,
    CheckpointError,
    ConfigError,
    PluginError,
    UnknownMethodError,
)
from specreg.registry import Registry


def registry(*plugins: ToyPlugin) -> Registry:
    return Registry.from_plugins(plugins)


def select(loaded: Registry, draft_config=None, *, target_config=None, **keys):
    keys = {"num_speculative_tokens": 3} | keys
    return loaded.select(SpeculativeConfig.parse(keys), draft_config, target_config)


def accepts_wide(config):
    return config.get("width", 0) > 1


FAMILY = {
    "plain": spec("plain", methods=("fam",)),
    "wide": spec("wide", methods=("fam",), predicate=accepts_wide),
    "arch": spec("arch", methods=("fam",), architectures=("FamModel", "OtherModel")),
    "typed": spec("typed", methods=("fam",), model_types=("fam_typed",)),
    "both": spec("both", methods=("fam",), architectures=("FamModel",), predicate=accepts_wide),
}


@pytest.mark.parametrize(
    ("draft_config", "expected"),
    [
        ({}, "plain"),
        ({"width": 2}, "wide"),
        ({"architectures": ["FamModel"]}, "arch"),
        ({"architectures": ["OtherModel"], "width": 2}, "arch"),
        ({"architectures": ["FamModel"], "width": 2}, "both"),
        ({"model_type": "fam_typed"}, "typed"),
        ({"speculators_model_type": "fam_typed"}, "typed"),
        ({"architectures": "FamModel"}, "arch"),
        ({"architectures": None, "model_type": 3}, "plain"),
        (None, "plain"),
    ],
)
def test_the_most_specific_speculator_that_matches_is_selected(draft_config, expected):
    for order in itertools.permutations(FAMILY.values()):
        loaded = registry(ToyPlugin(*order))
        assert select(loaded, draft_config, method="fam").spec.name == expected


def test_with_an_unknown_draft_config_a_single_narrowed_speculator_is_taken():
    loaded = registry(ToyPlugin(FAMILY["both"]))
    selection = select(loaded, None, method="fam")
    assert selection.spec.name == "both"
    assert selection.setup.draft_config == {}


def test_with_an_unknown_draft_config_equally_narrowed_speculators_cannot_be_told_apart():
    loaded = registry(ToyPlugin(FAMILY["arch"], FAMILY["typed"]))
    with pytest.raises(AmbiguousSpeculatorError, match=r"its config\.json decides between them"):
        select(loaded, None, method="fam")


@pytest.mark.parametrize("flip", [False, True])
def test_two_equally_specific_speculators_are_an_error_that_names_both_and_the_pin(flip):
    plugins = [ToyPlugin(spec("a", methods=("m",)), name="dist-a")]
    plugins.append(ToyPlugin(spec("a", methods=("m",), factory="rival:make"), name="dist-b"))
    loaded = registry(*(plugins[::-1] if flip else plugins))
    with pytest.raises(AmbiguousSpeculatorError) as caught:
        select(loaded, {}, method="m")
    assert "dist-a 0" in caught.value.got
    assert "dist-b 0" in caught.value.got
    assert '"plugin": "dist-a"' in caught.value.fix
    assert select(loaded, {}, method="m", plugin="Dist_B").distribution == "dist-b"


def test_two_equally_specific_speculators_of_one_plugin_are_its_authors_business():
    loaded = registry(ToyPlugin(spec("a", methods=("m",)), spec("b", methods=("m",))))
    with pytest.raises(AmbiguousSpeculatorError, match="report it to the plugin's authors"):
        select(loaded, {}, method="m")


def test_an_unknown_method_lists_the_known_ones_and_the_nearest_spelling():
    loaded = registry(ToyPlugin(spec("lookup"), spec("other")))
    with pytest.raises(UnknownMethodError, match=r"did you mean 'lookup'\? known: lookup, other"):
        select(loaded, {}, method="lokup")


def test_a_checkpoint_that_no_speculator_of_the_method_takes_is_told_apart():
    loaded = registry(ToyPlugin(FAMILY["arch"], FAMILY["typed"]))
    with pytest.raises(UnknownMethodError) as caught:
        select(loaded, {"architectures": ["Foreign"]}, method="fam")
    assert "for this draft checkpoint" in caught.value.what
    assert "['Foreign']" in caught.value.got
    assert "['FamModel', 'OtherModel', 'fam_typed']" in caught.value.got


class TestWithoutAMethod:
    def test_it_is_detected_from_architectures_model_types_or_a_predicate(self):
        loaded = registry(ToyPlugin(*FAMILY.values(), spec("unrelated")))
        for draft_config, expected in (
            ({"architectures": ["OtherModel"]}, "arch"),
            ({"speculators_model_type": "fam_typed"}, "typed"),
            ({"width": 5}, "wide"),
        ):
            selection = select(loaded, draft_config)
            assert selection.spec.name == expected
            assert selection.speculative.method == "fam"

    def test_a_speculators_config_names_it(self):
        loaded = registry(ToyPlugin(*FAMILY.values(), spec("other", architectures=("FamModel",))))
        draft_config = {"speculators_config": {"algorithm": "fam"}, "architectures": ["FamModel"]}
        assert select(loaded, draft_config).spec.name == "arch"

    def test_an_algorithm_that_nothing_serves_is_no_method(self):
        loaded = registry(ToyPlugin(FAMILY["arch"]))
        draft_config = {"speculators_config": {"algorithm": "x"}, "architectures": ["FamModel"]}
        assert select(loaded, draft_config).speculative.method == "fam"

    @pytest.mark.parametrize("draft_config", [None, {}, {"architectures": ["Foreign"]}])
    def test_what_cannot_be_detected_must_be_said(self, draft_config):
        loaded = registry(ToyPlugin(FAMILY["plain"], FAMILY["arch"]))
        with pytest.raises(UnknownMethodError, match=r"known methods: fam[\s\S]*set 'method'"):
            select(loaded, draft_config, model="somewhere")


def raises_import_error(name: str) -> ToyPlugin:
    class Broken(ToyPlugin):
        @property
        def specs(self):
            raise ImportError("no module named warp")

        @specs.setter
        def specs(self, value):
            pass

    return Broken(name=name)


class TestBrokenPlugins:
    """Only the names of its entry point and distribution are known of a plugin that failed."""

    @pytest.mark.parametrize("method", ["warp-drafts", "warp_drafts"])
    def test_the_method_named_like_one_shows_its_own_error(self, method):
        loaded = registry(raises_import_error("specreg-warp-drafts"), ToyPlugin(spec("other")))
        with pytest.raises(BrokenPluginError, match="no module named warp"):
            select(loaded, {}, method=method)

    def test_another_unknown_method_lists_known_and_failed_plugins(self):
        loaded = registry(raises_import_error("specreg-warp"), ToyPlugin(spec("other")))
        with pytest.raises(UnknownMethodError) as caught:
            select(loaded, {}, method="typo")
        assert "known: other" in caught.value.got
        assert "failed to load: specreg-warp" in caught.value.got
        assert "no module named warp" in caught.value.got

    def test_a_pinned_one_shows_its_own_error(self):
        loaded = registry(raises_import_error("specreg-warp"), ToyPlugin(spec("other")))
        with pytest.raises(BrokenPluginError, match=r"specreg-warp[\s\S]*no module named warp"):
            select(loaded, {}, method="other", plugin="specreg-warp")

    def test_detection_mentions_them(self):
        loaded = registry(raises_import_error("specreg-warp"))
        with pytest.raises(UnknownMethodError, match="failed to load: specreg-warp"):
            select(loaded, {"architectures": ["Foreign"]}, model="x")

    def test_one_that_was_more_specific_is_not_replaced_by_another(self):
        newer = spec("newer", methods=("fam",), architectures=("FamModel",), api_version=2)
        loaded = registry(ToyPlugin(newer, name="newer-dist"), ToyPlugin(FAMILY["plain"]))
        with pytest.raises(BrokenPluginError, match=r"newer-dist[\s\S]*2; allowed: 1 to 1"):
            select(loaded, {"architectures": ["FamModel"]}, method="fam")
        with pytest.raises(BrokenPluginError, match="newer-dist"):
            select(loaded, {"architectures": ["FamModel"]})
        assert select(loaded, {}, method="fam").spec.name == "plain"

    def test_one_that_is_named_like_the_method_may_have_served_the_checkpoint(self):
        loaded = registry(raises_import_error("specreg-fam"), ToyPlugin(FAMILY["arch"]))
        with pytest.raises(BrokenPluginError, match="specreg-fam"):
            select(loaded, {"architectures": ["Foreign"]}, method="fam")

    def test_one_that_had_offered_the_method_before_it_failed_is_named(self):
        newer = spec("newer", methods=("fam",), api_version=2)
        with pytest.raises(BrokenPluginError, match="newer-dist"):
            select(registry(ToyPlugin(newer, name="newer-dist")), {}, method="fam")

    def test_one_whose_predicate_fails_too_hurts_no_other(self):
        newer = spec("newer", methods=("fam",), predicate=lambda config: 1 / 0, api_version=2)
        loaded = registry(ToyPlugin(newer), ToyPlugin(FAMILY["plain"]))
        assert select(loaded, {}, method="fam").spec.name == "plain"

    def test_one_that_was_less_specific_does_not_matter(self):
        newer = spec("newer", methods=("fam",), api_version=2)
        loaded = registry(ToyPlugin(newer, name="newer-dist"), ToyPlugin(FAMILY["arch"]))
        assert select(loaded, {"architectures": ["FamModel"]}, method="fam").spec.name == "arch"
        with pytest.raises(BrokenPluginError, match="newer-dist"):
            select(loaded, {"architectures": ["Foreign"]}, method="fam")


def test_a_pin_that_is_not_installed_gets_the_nearest_spelling():
    loaded = registry(ToyPlugin(spec("m"), name="specreg-lookup"))
    with pytest.raises(ConfigError, match="did you mean 'specreg-lookup'"):
        select(loaded, {}, method="m", plugin="specreg-lokup")


def test_a_pin_restricts_the_methods_that_are_known():
    loaded = registry(ToyPlugin(spec("m"), name="one"), ToyPlugin(spec("n"), name="two"))
    with pytest.raises(UnknownMethodError, match="known: n"):
        select(loaded, {}, method="m", plugin="two")


def test_a_predicate_that_fails_names_the_speculator():
    loaded = registry(ToyPlugin(spec("m", predicate=lambda config: config["absent"])))
    with pytest.raises(PluginError, match=r"predicate of speculator 'm' failed[\s\S]*KeyError"):
        select(loaded, {}, method="m")


def test_a_speculator_with_a_checkpoint_of_its_own_needs_the_key_model():
    loaded = registry(ToyPlugin(spec("m", needs_checkpoint=True)))
    with pytest.raises(ConfigError, match="'m' needs a draft checkpoint"):
        select(loaded, method="m")
    assert select(loaded, method="m", model="x").spec.name == "m"


@pytest.mark.parametrize("style", DraftingStyle)
def test_parallel_drafting_may_only_say_what_the_speculator_does(style):
    loaded = registry(ToyPlugin(spec("m", capabilities=capabilities(style=style))))
    is_parallel = style is not DraftingStyle.AUTOREGRESSIVE
    assert select(loaded, method="m", parallel_drafting=is_parallel)
    with pytest.raises(
        ConfigError, match=f"allowed: null or {is_parallel}, as it is {style.value}"
    ):
        select(loaded, method="m", parallel_drafting=not is_parallel)


class TestTheNumberOfDraftTokens:
    @pytest.mark.parametrize(
        "draft_config",
        [
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}},
            {"n_predict": 5},
        ],
    )
    def test_is_taken_from_the_draft_config_when_it_is_not_given(self, draft_config):
        loaded = registry(ToyPlugin(spec("m")))
        selection = select(loaded, draft_config, method="m", num_speculative_tokens=None)
        assert selection.speculative.num_speculative_tokens == 5
        given = select(loaded, draft_config, method="m", num_speculative_tokens=2)
        assert given.speculative.num_speculative_tokens == 2

    @pytest.mark.parametrize(
        "draft_config",
        [
            {},
            {"n_predict": 0},
            {"n_predict": True},
            {"speculators_config": {"proposal_methods": []}},
            {"speculators_config": {"proposal_methods": [3]}},
        ],
    )
    def test_must_be_known(self, draft_config):
        loaded = registry(ToyPlugin(spec("m")))
        with pytest.raises(ConfigError, match="set 'num_speculative_tokens'"):
            select(loaded, draft_config, method="m", num_speculative_tokens=None)

    def test_from_the_draft_config_is_checked_against_the_synthetic_rates(self):
        loaded = registry(ToyPlugin(spec("m")))
        keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5]}
        with pytest.raises(ConfigError, match="num_speculative_tokens = 2"):
            select(loaded, {"n_predict": 2}, method="m", num_speculative_tokens=None, **keys)


class ToyOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    search_depth: int = 4


class TestOptions:
    loaded = registry(ToyPlugin(spec("m", options_model=ToyOptions), spec("n")))

    def test_are_validated_by_the_speculator_that_is_selected(self):
        assert select(self.loaded, method="m").setup.options == ToyOptions()
        assert select(self.loaded, method="m", search_depth=2).setup.options.search_depth == 2
        assert select(self.loaded, method="n").setup.options is None

    def test_of_a_wrong_value_name_the_key(self):
        with pytest.raises(ConfigError, match=r"where: speculative_config\.search_depth"):
            select(self.loaded, method="m", search_depth="deep")

    def test_that_nothing_knows_get_the_nearest_spelling(self):
        with pytest.raises(ConfigError, match="did you mean 'search_depth'"):
            select(self.loaded, method="m", serch_depth=2)
        with pytest.raises(ConfigError, match="did you mean 'num_speculative_tokens'"):
            select(self.loaded, method="n", num_speculative_token=2)

    def test_of_another_method_are_not_dropped(self):
        with pytest.raises(ConfigError, match=r"'n' has no option 'prompt_lookup_max'.*another"):
            select(self.loaded, method="n", prompt_lookup_max=3)


class TestDetectionByTheSpeculatorItself:
    def test_a_speculator_without_a_narrowing_is_found_by_what_it_detects(self):
        loaded = registry(
            ToyPlugin(spec("plain")),
            ToyPlugin(spec("heads", detects=lambda config: "head_width" in config)),
        )
        assert select(loaded, {"head_width": 3}).spec.name == "heads"
        with pytest.raises(UnknownMethodError, match="cannot be detected"):
            select(loaded, {"width": 3})

    def test_a_detection_that_fails_names_the_speculator(self):
        loaded = registry(ToyPlugin(spec("heads", detects=lambda config: config["absent"])))
        with pytest.raises(PluginError, match="detects of speculator 'heads' failed"):
            select(loaded, {"head_width": 3})


class TestWeightsInsideTheTarget:
    loaded = registry(ToyPlugin(spec("inner", may_lie_in_target=True, needs_checkpoint=True)))

    def test_are_described_by_the_targets_config(self):
        selection = select(self.loaded, method="inner", target_config={"modules": 1})
        assert selection.setup.draft_config == {"modules": 1}

    def test_give_way_to_a_checkpoint_of_its_own(self):
        selection = select(
            self.loaded, {"modules": 2}, method="inner", model="own", target_config={"modules": 1}
        )
        assert selection.setup.draft_config == {"modules": 2}
        assert selection.setup.target_config == {"modules": 1}


class TestTheDeclaredNumberOfDraftTokens:
    def test_is_the_speculators_default_where_no_key_says_it(self):
        with_default = spec(
            "toy", default_num_speculative_tokens=lambda config: config.get("depth")
        )
        loaded = registry(ToyPlugin(with_default))
        asked = {"method": "toy", "num_speculative_tokens": None}
        assert select(loaded, {"depth": 4}, **asked).speculative.num_speculative_tokens == 4
        assert select(loaded, {"depth": 4}, method="toy").setup.num_speculative_tokens == 3
        with pytest.raises(ConfigError, match="draft tokens is not known"):
            select(loaded, {}, **asked)

    def test_a_draft_config_that_is_at_fault_is_told_as_such(self):
        def default(config):
            raise CheckpointError("no depth", where="config.json", got="{}", fix="add it")

        loaded = registry(ToyPlugin(spec("toy", default_num_speculative_tokens=default)))
        with pytest.raises(CheckpointError, match="no depth"):
            select(loaded, {"a": 1}, method="toy", num_speculative_tokens=None)

    def test_may_not_exceed_what_the_speculator_can(self):
        bounded = spec("toy", capabilities=capabilities(max_num_speculative_tokens=2))
        with pytest.raises(ConfigError, match="3; allowed: 1 to 2"):
            select(registry(ToyPlugin(bounded)), method="toy")
