from __future__ import annotations

from collections import Counter

import pytest
from hook_groups import Played, played, prompt
from hypothesis import given
from hypothesis import strategies as st

from rillflow.dataflow.hooks.curators import Curriculum, Greso, Mixing, Solved

# ---------------------------------------------------------------- GRESO


def z_of(greso: Greso, name: str) -> int:
    return greso.get(f"@{name}", [0])[0]


def test_greso_counts_rounds_without_variance_in_a_row():
    greso = Greso()
    assert greso.state() == {}
    for rewards, z in [((1, 1), 1), ((1, 1), 2), ((0, 0), 1), ((0, 0), 2), ((0, 1), 0), ((1, 1), 1)]:
        greso.observe(played("a", *rewards))
        assert z_of(greso, "a") == z, rewards


def test_greso_says_nothing_of_groups_of_one():
    greso = Greso()
    greso.observe(played("a", 1.0))
    assert greso.state() == {}


def test_greso_takes_every_group_of_a_prompt_in_flight_as_a_round():
    greso = Greso(floor_easy=0)
    assert greso.admit(prompt("a"))
    assert greso.admit(prompt("a"))
    greso.observe(played("a", 1, 1))
    greso.observe(played("a", 1, 1))
    assert z_of(greso, "a") == 2
    greso.observe(played("a", 0, 1))
    assert z_of(greso, "a") == 0


@pytest.mark.parametrize(
    ("rewards", "rounds", "expected"),
    [((1, 1), 1, 0.5), ((1, 1), 2, 0.25), ((1, 1), 9, 0.05), ((0, 0), 1, 0.5), ((0.5, 0.5), 3, 0.30)],
)
def test_greso_plays_with_the_probability_of_the_formula(rewards, rounds, expected):
    greso, names = Greso(seed=1), [f"p{number}" for number in range(4000)]
    for name in names:
        for _ in range(rounds):
            greso.observe(played(name, *rewards))
    share = sum(greso.admit(prompt(name)) for name in names) / len(names)
    assert share == pytest.approx(expected, abs=0.03)


def test_greso_draws_anew_at_every_visit_and_the_same_under_the_same_seed():
    def visits(seed: int) -> list[bool]:
        greso = Greso(seed=seed)
        greso.observe(played("a", 1, 1))
        return [greso.admit(prompt("a")) for _ in range(200)]

    assert visits(1) == visits(1) != visits(2)
    assert 60 < sum(visits(1)) < 140


def armed() -> Greso:
    greso = Greso()
    for _ in range(2):
        greso.admit(prompt("first"))
    return greso


def test_greso_steers_towards_its_targets():
    greso = armed()
    for rewards in [(1, 1), (0, 0), *[(0, 1)] * 10]:  # both 1/12 of all
        greso.observe(played("a", *rewards))
    greso.on_version(1)
    assert (greso.probability("easy"), greso.probability("hard")) == (0.5 - 0.01, 0.5 + 0.01)
    for rewards in [(0, 0), (0, 0), *[(0, 1)] * 9]:
        greso.observe(played("a", *rewards))
    greso.on_version(2)
    assert greso.probability("easy") == pytest.approx(0.5)
    assert greso.probability("hard") == pytest.approx(0.5)


def test_greso_stays_where_it_saw_nothing_and_within_its_bounds():
    greso = armed()
    greso.on_version(1)
    assert greso.probability("easy") == 0.5
    for version in range(100):
        greso.observe(played("a", 1, 1))
        greso.on_version(version)
    assert (greso.probability("easy"), greso.probability("hard")) == (0.01, 0.99)


def test_greso_is_armed_by_the_second_pass_over_every_source():
    greso = Greso()
    everything = [prompt(f"a{n}", "a") for n in range(3)] + [prompt(f"b{n}", "b") for n in range(200)]

    def moves() -> bool:
        before = greso.probability("easy")
        greso.observe(played("x", 1, 1))
        greso.on_version(1)
        return greso.probability("easy") != before

    for each in everything:
        greso.admit(each)
    greso.admit(everything[0])  # the small source comes round early
    assert not moves()
    greso.admit(everything[-1])  # not among the first that were remembered
    assert not moves()
    greso.admit(everything[10])
    assert moves()
    assert "sources" not in greso.state()


# ---------------------------------------------------------------- curriculum


def test_curriculum_goes_by_a_key_and_a_limit_that_rises():
    curriculum = Curriculum(start=1, end=5, versions=4, key="level")
    easy, hard = prompt("a", level=1), prompt("b", level=4)
    seen = []
    for version in range(6):
        curriculum.on_version(version)
        seen.append((curriculum.limit, curriculum.admit(easy), curriculum.admit(hard)))
    assert seen == [
        *((1, True, False), (2, True, False), (3, True, False)),
        *((4, True, True), (5, True, True), (5, True, True)),
    ]


@pytest.mark.parametrize("payload", [{}, {"level": "Level 5"}, {"level": None}, {"level": float("nan")}])
def test_curriculum_plays_what_it_knows_nothing_of(payload):
    assert Curriculum(start=1, end=5, versions=4, key="level").admit(prompt("a", **payload))


def test_curriculum_learns_from_mean_rewards_and_keeps_only_what_it_may_skip():
    curriculum = Curriculum(start=0.5, end=1.0, versions=10)
    curriculum.observe(played("easy", 1, 0.5))
    curriculum.observe(played("hard", 0, 0, 0, 1))
    assert curriculum.state() == {"@hard": 0.75}
    assert [curriculum.admit(prompt(name)) for name in ("easy", "hard", "new")] == [True, False, True]
    curriculum.on_version(5)
    assert curriculum.admit(prompt("hard"))
    curriculum.observe(played("hard", 1, 1))
    assert curriculum.state() == {"version": 5}


# ---------------------------------------------------------------- solved


def test_solved_prompts_rest_and_are_played_once_before_they_rest_again():
    solved = Solved(times=2, rest=3)

    def visits(count: int) -> str:
        return "".join("+" if solved.admit(prompt("a")) else "-" for _ in range(count))

    solved.observe(played("a", 1, 1))
    assert visits(2) == "++"
    solved.observe(played("a", 1, 1))
    assert visits(4) == "---+"
    solved.observe(played("a", 1, 1))
    assert visits(4) == "---+"
    solved.observe(played("a", 1, 0))
    assert solved.state() == {}
    solved.observe(played("a", 1, 1))
    assert visits(2) == "++"


def test_groups_in_flight_do_not_lengthen_a_rest_but_may_end_it():
    solved = Solved(times=1, rest=2, threshold=0.5)
    solved.observe(played("a", 1, 0))
    assert not solved.admit(prompt("a"))
    solved.observe(played("a", 1, 0))
    assert not solved.admit(prompt("a"))
    assert solved.admit(prompt("a"))
    solved.observe(played("a", 1, 0))
    solved.observe(played("a", 0, 0))
    assert solved.admit(prompt("a"))


# ---------------------------------------------------------------- mixing

SOURCES = ("a", "b", "c")


@given(st.lists(st.sampled_from(SOURCES), min_size=1, max_size=400))
def test_shares_follow_the_weights_and_some_source_is_always_owed_one(offers):
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    mixing, played_of = Mixing(weights=weights, patience=10_000), Counter()
    for source in SOURCES:  # all are known from the start
        played_of[source] += mixing.admit(prompt("x", source))
    for source in offers:
        played_of[source] += mixing.admit(prompt("x", source))
        total = played_of.total()
        # The counts from before all sources were known may be off by one each.
        assert all(played_of[each] - weights[each] / 8 * total <= len(SOURCES) for each in SOURCES)
        assert sum(mixing.get("credits").values()) == pytest.approx(0, abs=1e-6)


def test_shares_of_an_even_stream_are_the_weights():
    mixing, played_of = Mixing(weights={"a": 1, "b": 3}), Counter()
    for _ in range(2000):
        for source in ("a", "b"):
            played_of[source] += mixing.admit(prompt("x", source))
    assert played_of["b"] == 2000
    assert played_of["a"] == pytest.approx(2000 / 3, abs=2)


@given(st.lists(st.sampled_from(SOURCES), max_size=60), st.sampled_from(SOURCES))
def test_a_source_that_ran_out_starves_nobody(offers, left):
    patience = 7
    mixing = Mixing(weights={"a": 0.01, "b": 1, "c": 50}, patience=patience)
    for source in offers:
        mixing.admit(prompt("x", source))
    verdicts = [mixing.admit(prompt("x", left)) for _ in range(40)]
    assert all(verdicts[patience + 1 :])


@given(st.lists(st.sampled_from(SOURCES[:2]), min_size=30, max_size=60))
def test_while_two_sources_stay_the_run_of_skips_is_bounded(offers):
    patience = 5
    mixing, skipped = Mixing(weights={"a": 1, "b": 9, "c": 90}, patience=patience), 0
    mixing.admit(prompt("x", "c"))
    for source in offers:
        skipped = 0 if mixing.admit(prompt("x", source)) else skipped + 1
        assert skipped <= 2 * (patience + 1)


def test_a_source_that_comes_back_does_not_catch_up():
    mixing = Mixing(weights={"a": 1, "b": 1}, patience=5)
    for _ in range(100):
        mixing.admit(prompt("x", "a"))
    verdicts = [(mixing.admit(prompt("x", "b")), mixing.admit(prompt("x", "a"))) for _ in range(20)]
    assert all(Counter(pair)[True] >= 1 for pair in verdicts)
    assert sum(second for _, second in verdicts) >= 18


def test_sources_without_a_weight_are_played_and_not_counted():
    mixing = Mixing(weights={"a": 1})
    assert all(mixing.admit(prompt("x", "other")) for _ in range(10))
    assert mixing.state() == {}


def test_mixing_takes_other_weights_after_a_restart():
    before, after = Mixing(weights={"a": 1, "b": 1}), Mixing(weights={"b": 1, "c": 1})
    for source in "aababb":
        before.admit(prompt("x", source))
    after.restore(before.state())
    assert sum(after.admit(prompt("x", source)) for source in "bcbcbc") >= 5


def test_curators_that_do_not_learn_from_groups_or_versions_take_them_all_the_same():
    mixing, solved = Mixing(weights={"a": 1}), Solved()
    mixing.observe(Played(prompt("x"), [1.0]))
    for curator in (mixing, solved):
        curator.on_version(3)
        assert curator.state() == {}
