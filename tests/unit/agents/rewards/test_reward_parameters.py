"""A reward is given what its parameters name; a name that means nothing is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest

from rillflow.agents.rewards.base import (
    OF_ANSWERS,
    OF_GROUPS,
    Given,
    Parameters,
    Part,
    Sum,
    call,
    is_of_groups,
    parameters_of,
)
from rillflow.errors import ConfigError
from rillflow.types import EpisodeFacts

FACTS = EpisodeFacts(task="t", prompt="p", policies=["agent"], seed=1, evaluating=False, seconds=2.0)
MESSAGES = [{"role": "user", "content": "hello"}]


def given() -> Given:
    return Given({"x": 1}, "said", read=lambda: MESSAGES, metrics={"turns": 2.0}, episode=FACTS)


class Named:
    def __call__(self, episode: Any, answer: Any) -> Any:
        return episode, answer


def decorated(reward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(reward)
    def wrapped(*arguments: Any) -> Any:
        return reward(*arguments)

    return wrapped


async def later(metrics: Any, *, payload: Any) -> Any:
    return metrics, payload


CASES: list[tuple[Callable[..., Any], Any]] = [
    (lambda payload, answer: (payload, answer), ({"x": 1}, "said")),
    (lambda row, text: (row, text), ({"x": 1}, "said")),
    (lambda row, text="": (row, text), ({"x": 1}, "said")),
    (lambda *both: both, ({"x": 1}, "said")),
    (lambda payload, *rest: (payload, rest), ({"x": 1}, ("said",))),
    (lambda answer, payload: (payload, answer), ({"x": 1}, "said")),
    (lambda answer: answer, "said"),
    (lambda messages, metrics: (messages, metrics), (MESSAGES, {"turns": 2.0})),
    (lambda row, text, episode: (row, text, episode), ({"x": 1}, "said", FACTS)),
    (lambda payload, answer, most=3, metrics=None: (most, metrics), (3, {"turns": 2.0})),
    (lambda payload, answer, **others: others, {}),
    (partial(lambda payload, answer, most, episode: (answer, most, episode), most=4), ("said", 4, FACTS)),
    (decorated(lambda payload, answer: (payload, answer)), ({"x": 1}, "said")),
    (Named(), (FACTS, "said")),
    (later, ({"turns": 2.0}, {"x": 1})),
]


@pytest.mark.parametrize(("reward", "expected"), CASES)
async def test_it_is_given_what_it_names(reward: Callable[..., Any], expected: Any) -> None:
    assert await call(reward, given()) == expected


def test_a_builtin_that_does_not_tell_gets_the_pair() -> None:
    assert parameters_of(max) == Parameters(places=True)


async def test_messages_are_made_only_for_those_that_name_them() -> None:
    def read() -> Any:
        raise AssertionError("nobody asked")

    known = Given({}, "said", read=read, episode=FACTS)
    assert await call(lambda payload, answer, episode: answer, known) == "said"
    total = Sum([Part("a", 1.0, lambda payload, answer: 1.0), Part("b", 2.0, lambda episode: episode.seconds)])
    assert await call(total, known) == 5.0


async def test_of_an_answer_alone_nothing_else_is_known() -> None:
    assert await call(lambda payload, answer, messages=None: messages, Given({}, "said")) is None
    with pytest.raises(ConfigError, match="name payload, answer"):
        parameters_of(lambda payload, answer, messages: 0.0, "r", OF_ANSWERS)


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (lambda payload, answer, words: 0.0, "words"),
        (lambda row, messages: 0.0, "row"),
        (lambda words: 0.0, "words"),
        (lambda answer, words: 0.0, "words"),
        (lambda payload, answer, *, words: 0.0, "words"),
        (lambda words, payload: 0.0, "words"),
    ],
)
def test_what_names_nothing_is_refused_with_the_names(reward: Callable[..., Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parameters_of(reward, "mine.py:reward")
    assert f"reward mine.py:reward: its parameter {name!r} names nothing" in str(refused.value)
    assert "name payload, answer, messages, metrics, episode" in str(refused.value)


@pytest.mark.parametrize(
    ("reward", "named"),
    [(lambda group: [], ("group",)), (lambda payload, group: [], ("payload", "group"))],
)
def test_of_a_group_it_is_given_payload_and_group(reward: Callable[..., Any], named: tuple[str, ...]) -> None:
    assert is_of_groups(reward)
    assert parameters_of(reward, "r", OF_GROUPS) == Parameters(places=False, names=named)


@pytest.mark.parametrize("reward", [lambda group, answer: [], lambda payload, answer, group: []])
def test_of_a_group_what_belongs_to_one_episode_is_refused(reward: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"'answer' belongs to one episode.*\n?.*group\[0\].answer"):
        parameters_of(reward, "r", OF_GROUPS)


def test_others_are_not_of_groups() -> None:
    assert not any(is_of_groups(reward) for reward, _ in CASES)
    assert not is_of_groups(max)
