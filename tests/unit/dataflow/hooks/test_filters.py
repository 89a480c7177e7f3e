from __future__ import annotations

import pytest
from hook_groups import Played, prompt
from hypothesis import given
from hypothesis import strategies as st

from rillflow.dataflow.hooks.filters.expression import Expression
from rillflow.dataflow.hooks.filters.language import FUNCTIONS
from rillflow.dataflow.hooks.filters.length_band import LengthBand
from rillflow.dataflow.hooks.filters.overlong import Overlong
from rillflow.dataflow.hooks.filters.staleness import Staleness
from rillflow.dataflow.hooks.filters.zero_variance import ZeroVariance
from rillflow.errors import ConfigError

GROUP = Played(
    prompt("p", level=3, tags=["algebra"], text="what is 2 + 2?", many=list(range(5000))),
    rewards=[0.0, 1.0, 1.0, 0.5],
    lengths=[10, 20, 30, 40],
    truncated=[False, False, True, False],
    staleness=2,
)


def group(**fields):
    return Played(prompt("p"), **({"rewards": [0.0, 1.0]} | fields))


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [([1.0, 1.0], "zero_variance"), ([0.0, 1.0], True), ([1.0], True), ([0, 0, 0], "zero_variance")],
)
def test_zero_variance(rewards, verdict):
    assert ZeroVariance().keep(group(rewards=rewards)) == verdict


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [([0.5, 0.5009], "zero_variance"), ([0.5, 0.503], True), ([0.7], True), ([0.2, 0.2], "zero_variance")],
)
def test_zero_variance_of_a_models_scores(rewards, verdict):
    assert ZeroVariance(least=1e-3).keep(group(rewards=rewards)) == verdict


@pytest.mark.parametrize(
    ("share", "cut", "verdict"), [(0.5, 2, True), (0.5, 3, "overlong"), (0, 1, "overlong"), (0, 0, True), (1, 4, True)]
)
def test_overlong(share, cut, verdict):
    assert Overlong(share=share).keep(group(truncated=[place < cut for place in range(4)])) == verdict


@pytest.mark.parametrize(("staleness", "verdict"), [(0, True), (2, True), (3, "stale")])
def test_staleness(staleness, verdict):
    assert Staleness(most=2).keep(group(staleness=staleness)) == verdict


@pytest.mark.parametrize(
    ("lengths", "verdict"), [([10, 20], True), ([9, 10], "too_short"), ([19, 22], "too_long"), ([5, 30], True)]
)
def test_length_band(lengths, verdict):
    assert LengthBand(shortest=10, longest=20).keep(group(lengths=lengths)) == verdict


def test_a_length_band_without_an_upper_end():
    assert LengthBand().keep(group(lengths=[10**9])) is True


# ---------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    "text",
    [
        "mean(rewards) == 0.625",
        "abs(std(rewards) - 0.414578) < 1e-6",
        "min(rewards) == 0 and max(rewards) == 1 and sum(rewards) == 2.5",
        "len(lengths) == 4 and mean(lengths) == 25",
        "0 < staleness <= 2 < 3",
        "not all(truncated) and any(truncated)",
        "sum(truncated) / len(truncated) <= 0.25",
        "prompt['level'] >= 3 and 'algebra' in prompt['tags'] and 'geometry' not in prompt['tags']",
        "'source' not in prompt or prompt['source'] == 'math'",
        "rewards[0] < rewards[-1]",
        "any(reward > 0.9 for reward in rewards)",
        "len([length for length in lengths if length > 15 if length < 35]) == 2",
        "all(any(other >= length for other in lengths) for length in lengths)",
        "round(mean(rewards), 1) == 0.6 and round(2.6) == 3",
        "(2 if staleness > 5 else 7) == 7",
        "-2 ** 2 == -4 and 7 // 2 == 3 and 7 % 4 == 3 and +1 == 1 and 2 * 3 - 1 == 5",
        "max(1, 2, staleness) == 2 and staleness in [1, 2] and staleness in (2, 3)",
        "(0 or 3) == 3 and (1 and 2) == 2",
        "  True  ",
        "round(5, 0 - 999999999) == 0",  # which Python takes minutes for
        "len(prompt['many']) == 5000 and mean(prompt['many']) == 2499.5",
    ],
)
def test_expressions_that_are_true(text):
    assert Expression(keep=text).keep(GROUP) is True


def test_a_drop_is_counted_under_the_reason():
    assert Expression(keep="mean(rewards) > 0.9").keep(GROUP) == "expression"
    assert Expression(keep="mean(rewards) > 0.9", reason="hard").keep(GROUP) == "hard"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("rewards.mean > 1", 1, "Attribute is not allowed"),
        ("1 + prompt.__class__", 5, "Attribute is not allowed"),
        ("staleness > 1 and __import__('os')", 19, "there is no function of this name"),
        ("rewards[0](1)", 1, "only functions by their name"),
        ("(lambda: 1)()", 1, "only functions by their name"),
        ("meen(rewards) > 1", 1, "did you mean 'mean'"),
        ("1 < reward", 5, "did you mean 'rewards'"),
        ("1 < mean", 5, "did you mean mean(rewards)?"),
        ("round(1, ndigits=2)", 1, "without keywords"),
        ("max(*rewards)", 5, "Starred is not allowed"),
        ("rewards[0:1]", 9, "Slice is not allowed"),
        ("f'{rewards}'", 1, "JoinedStr is not allowed"),
        ("b'x' == 1", 1, "only numbers and text"),
        ("2 ** 100 > 1", 1, "exponents up to 64"),
        ("1 << 9", 1, "is not allowed"),
        ("1 is 1", 1, "is not allowed"),
        ("{1: 2}", 1, "Dict is not allowed"),
        ("any(x for x in rewards for y in lengths)", 4, "one `for name in values`"),
        ("any(x for x, y in rewards)", 4, "one `for name in values`"),
        ("any(len for len in rewards)", 13, "this name is taken"),
        ("any(rewards for rewards in lengths)", 17, "this name is taken"),
        ("any(x for x in rewards) and x", 29, "there is no value of this name"),
        ("(y := 3)", 2, "NamedExpr is not allowed"),
        ("mean(rewards) <", 15, "invalid syntax"),
        ("mean(rewards", 5, "never closed"),
        ("import os", 1, "invalid syntax"),
        ("", 0, "invalid syntax"),
        ("+".join("1" * 200), 1, "200 are allowed"),
        ("1" * 1001, None, "1000 are allowed"),
        ("(" * 300 + "1" + ")" * 300, None, "nested parentheses"),
    ],
)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_what_is_refused_is_named_with_its_place(text, place, what):
    with pytest.raises(ConfigError) as caught:
        Expression(keep=text)
    assert what in caught.value.message
    assert place is None or f"column {place}:" in caught.value.message


NESTED = "1"
for name in "abcdefghi":  # 4 ** 9 times the innermost
    NESTED = f"sum({NESTED} for {name} in lengths)"


SHARED, POWERS = "1", "9999"
for name in "abcdefgh":  # each level holds eight times what the one before held, or its fourth power
    SHARED = f"[[{','.join(name * 7)}] for {name} in [{SHARED}]]"
    POWERS = f"max({'*'.join(name * 4)} for {name} in [{POWERS}])"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sum([lengths, lengths], [])", TypeError),
        (f"{SHARED} == 1", ValueError),
        (f"{POWERS} > 1", ValueError),
        ("any(sum(prompt['many']) < 0 for a in prompt['many'])", ValueError),
        ("any(prompt['many'] != prompt['many'] for a in prompt['many'])", ValueError),
        ("prompt['missing'] > 1", KeyError),
        ("1 / (staleness - 2)", ZeroDivisionError),
        ("'a' * staleness == 'aa'", TypeError),
        ("rewards + lengths", TypeError),
        ("staleness ** (50 * staleness) > 1", ValueError),
        ("((10 ** 60) ** 60) ** 60 > 1", OverflowError),
        ("(0 - 8) ** 0.5 > 1", ValueError),
        (NESTED, ValueError),
    ],
)
def test_what_cannot_be_evaluated_raises_and_never_takes_long(text, error):
    with pytest.raises(error):
        Expression(keep=text).keep(GROUP)


TERMS = st.recursive(
    st.sampled_from(["rewards[0]", "staleness", "1", "0.5", "len(lengths)", "mean(rewards)", "sum(truncated)"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "<", "<=", "==", "and", "or"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        inner.map(lambda part: f"(not {part})"),
        inner.map(lambda part: f"sum({part} * r for r in rewards)"),
        st.tuples(inner, inner).map(lambda parts: f"max({parts[0]}, {parts[1]})"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
    ),
    max_leaves=12,
)


@given(TERMS)
def test_an_expression_means_what_it_means_in_python(text):
    """Python's own `eval` is the oracle; nested loops over one name are refused here and shadowed there."""
    values = {"rewards": GROUP.rewards, "lengths": GROUP.lengths, "truncated": GROUP.truncated, "staleness": 2}
    expected = eval(text, {"__builtins__": {}} | FUNCTIONS | values)
    try:
        expression = Expression(keep=text)
    except ConfigError as error:
        assert "this name is taken" in error.message or "are allowed" in error.message  # noqa: PT017
        return
    assert (expression.keep(GROUP) is True) == bool(expected)
