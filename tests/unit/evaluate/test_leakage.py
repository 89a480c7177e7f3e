"""Leakage: equal questions are found, others are not, and memory is bounded by the test alone."""

from __future__ import annotations

import pytest

from rillflow.cli.leakage import warning_of
from rillflow.contracts import PromptSource
from rillflow.dataflow.sources import InOrder
from rillflow.errors import ConfigError
from rillflow.evaluate import leakage
from rillflow.evaluate.leakage import look, same
from rillflow.types import Prompt

LONG = "a farmer has nine red hens and each of them lays two eggs on every day of the week but the last"


def source(*questions: str, name: str = "p", **more: object) -> PromptSource:
    return InOrder([Prompt(f"{name}{n}", {"question": text, **more}) for n, text in enumerate(questions)])


def test_texts_that_differ_in_case_and_punctuation_are_the_same() -> None:
    found = look(source("Other", "How MANY eggs?"), source("how many: eggs", "how many hens", name="t"))
    assert [(one.test, one.train, one.exact) for one in found.overlaps] == [("t0", "p1", True)]
    assert (found.exact, found.train, found.test) == (1, 2, 2)


def test_thirteen_words_in_a_row_are_found_and_twelve_are_not() -> None:
    words = LONG.split()
    thirteen, twelve = " ".join(words[3:16]), " ".join(words[3:15])
    test = source(LONG, name="t")
    (found,) = look(source(f"Once upon a time {thirteen} and more"), test).overlaps
    assert (found.test, found.exact) == ("t0", False)
    assert found.share == pytest.approx(1 / (len(words) - 12))
    assert not look(source(f"Once upon a time {twelve} and more"), test).overlaps
    assert look(source(f"Once upon a time {twelve} and more"), test, words=12).overlaps


def test_every_test_question_is_named_once_with_the_prompt_that_has_most_of_it() -> None:
    part = " ".join(LONG.split()[:15])
    found = look(source(part, f"{LONG} indeed", LONG, part), source(LONG, LONG, name="t"))
    assert [(one.test, one.train, one.exact) for one in found.overlaps] == [("t0", "p2", True), ("t1", "p2", True)]


def test_the_key_that_is_compared_can_be_named() -> None:
    train, test = source("a", "b", note="the same"), source("c", note="The same", name="t")
    assert not look(train, test).overlaps
    assert look(train, test, field="note").exact == 1
    with pytest.raises(ConfigError, match="no text under 'body'"):
        look(train, test, field="body")


def test_a_test_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "MOST_RUNS", 3)
    with pytest.raises(ConfigError, match="more than 3 runs"):
        look(source("x"), source(LONG, name="t"))


def test_the_cheap_look_compares_whole_payloads_but_not_ids() -> None:
    train = InOrder([Prompt("1", {"id": 1, "question": "count", "world": 3})])
    assert same(train, InOrder([Prompt("2", {"id": 2, "world": 3, "question": "count"})]), most=10) == ["2"]
    assert same(train, InOrder([Prompt("2", {"id": 1, "question": "count", "world": 4})]), most=10) == []


def test_the_cheap_look_knows_a_benchmarks_question_in_any_prompt() -> None:
    train = InOrder([Prompt("1", {"question": "Solve: How many?", "problem": "How many?", "benchmark": "a"})])
    test = InOrder([Prompt("9", {"question": "Tell me: how many?", "problem": "how many", "benchmark": "b"})])
    assert same(train, test, most=10) == ["9"]


def test_a_run_that_trains_on_what_it_is_tested_on_is_warned() -> None:
    assert warning_of(source("a", "b"), source("c", name="t")) is None
    assert warning_of(source("a"), None) is None
    said = warning_of(source("a", "b"), source("b", "c", name="t"))
    assert said is not None
    assert said.startswith("1 of 2 held-out prompts are among those trained on, such as 't0'")


@pytest.mark.needs("data")
def test_no_test_question_of_gsm8k_is_among_its_training_questions() -> None:
    from rillflow.config import SourceConfig
    from rillflow.dataflow.sources import open_source

    train, test = (
        open_source(SourceConfig(benchmark=name), seed=0, shuffle=False) for name in ("gsm8k_train", "gsm8k")
    )
    assert same(train, test, most=10_000) == []
    assert look(test, test).exact == test.length, "what is there is found"
