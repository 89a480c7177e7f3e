"""Sessions: keys, bounds, and seeds that do not depend on scheduling."""

from __future__ import annotations

import pytest

from rillflow.config import GatewayConfig
from rillflow.errors import QueueFull, RunError
from rillflow.gateway import Sessions
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.shapes import CallRefused


def opened(seed: int = 1, id: str = "a") -> Session:
    sessions = Sessions("secret")
    sessions.open(id, seed=seed, group="g", deadline_seconds=9)
    return sessions.get(id)


def seeds(session: Session, prompt: list[int], choices: int = 1, asked: int | None = None) -> list[int]:
    return session.seeds(session.draw("p", prompt), choices, asked)


def test_seeds_depend_on_the_prompt_and_not_on_the_order_of_calls() -> None:
    one, two = opened(), opened(id="b")
    first = [seeds(one, [1, 2]), seeds(one, [3]), seeds(one, [1, 2])]
    second = [seeds(two, [3]), seeds(two, [1, 2]), seeds(two, [1, 2])]
    assert first == [second[1], second[0], second[2]]
    assert first[0] != first[2]
    assert len(set(seeds(one, [9], choices=8))) == 8
    assert seeds(opened(seed=2), [1, 2]) != seeds(opened(), [1, 2])
    assert all(0 <= seed < 2**63 for seed in seeds(one, [5], choices=50))


def test_an_agents_seed_repeats_itself_within_a_session_only() -> None:
    session = opened()
    assert seeds(session, [1], asked=5) == seeds(session, [1], asked=5)
    assert seeds(session, [1], asked=5) != seeds(session, [1], asked=6)
    assert seeds(opened(seed=2), [1], asked=5) != seeds(session, [1], asked=5)


def test_a_failed_call_gives_its_draw_back() -> None:
    session = opened()
    lost, kept = session.draw("p", [1]), session.draw("p", [1])
    session.give_back(lost)
    assert session.draw("p", [1]) == lost
    assert session.draw("p", [1]).number == kept.number + 1
    assert session.draw("q", [1]).prompt != lost.prompt


def test_keys() -> None:
    sessions, others = Sessions("secret"), Sessions("other")
    key = sessions.open("task.1", seed=1, group="g", deadline_seconds=9)
    assert sessions.name_in(key) == "task.1"
    assert sessions.of_key(key).id == "task.1"
    assert sessions.name_in(others.open("task.1", seed=1, group="g", deadline_seconds=9)) == ""
    assert sessions.name_in(key[:-1] + ("0" if key[-1] != "0" else "1")) == ""
    sessions.close("task.1")
    with pytest.raises(CallRefused, match="not open"):
        sessions.of_key(key)
    with pytest.raises(CallRefused, match="not open"):
        sessions.close("task.1")


def test_what_cannot_be_opened() -> None:
    sessions = Sessions("secret", GatewayConfig(sessions=2))
    sessions.open("a", seed=1, group="g", deadline_seconds=9)
    for id in ("a", "", "x/y"):
        with pytest.raises(RunError):
            sessions.open(id, seed=1, group="g", deadline_seconds=9)
    sessions.open("b", seed=1, group="g", deadline_seconds=9)
    with pytest.raises(QueueFull):
        sessions.open("c", seed=1, group="g", deadline_seconds=9)
    assert len(sessions) == 2
