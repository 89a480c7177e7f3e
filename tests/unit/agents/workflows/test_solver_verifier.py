"""Solver and verifier: the prompts and rewards of each, and the reward of the trajectory."""

from __future__ import annotations

from typing import Any

import pytest

from rillflow.agents.workflows import solver_verifier
from rillflow.agents.workflows.solver_verifier import check_recipe, play, verdict_of
from rillflow.config import load_recipe
from rillflow.errors import ConfigError, WorkflowError
from team_play import TeamPlayed, in_turn, play_team

PAYLOAD = {"question": "How many?", "answer": "7"}
OPTIONS: dict[str, Any] = {"check": "rillflow.examples.digits:reward"}
APPROVE, REJECT = "I get 7. <verify>approve</verify>", "I get 7. <verify>reject</verify>"


async def played(solver: list[str], verifier: str, **more: Any) -> TeamPlayed:
    policies = {"solver": in_turn(solver), "verifier": in_turn([verifier])}
    return await play_team(play, PAYLOAD, policies, options=OPTIONS | more)


@pytest.mark.parametrize(
    ("solver", "verifier", "solved", "judged", "trajectory"),
    [
        (["7"], APPROVE, [1.0], 1.0, 1.0),
        (["3"], APPROVE, [0.0], 0.0, 0.0),
        (["3", "7"], REJECT, [0.0, 1.0], 1.0, 1.0),
        (["3", "4"], REJECT, [0.0, 0.0], 1.0, 0.0),
        (["7", "4"], REJECT, [1.0, 0.0], 0.0, 0.0),
        (["7", "7"], REJECT, [1.0, 1.0], 0.0, 1.0),
        (["7"], "no idea", [1.0], 0.0, 1.0),
        (["3"], "<verify>maybe</verify>", [0.0], 0.0, 0.0),
    ],
)
async def test_each_answer_has_its_own_reward(
    solver: list[str], verifier: str, solved: list[float], judged: float, trajectory: float
) -> None:
    episode = await played(solver, verifier)
    assert episode.of("solver") == solved
    assert episode.of("verifier") == [judged]
    assert episode.rewards == {"solver": trajectory, "verifier": judged}
    assert episode.reward == trajectory
    assert episode.metrics == {"first": solved[0], "retried": float(len(solver) == 2)}


@pytest.mark.parametrize(
    ("solver", "verifier", "trained", "others", "trajectory"),
    [
        (["7", "3"], [APPROVE, REJECT], [1.0, 1.0], [], 1.0),
        (["3", "7", "7"], [REJECT, REJECT], [1.0, 0.0], [], 1.0),
        (["7", "7"], [APPROVE], [], [1.0], 1.0),
        (["3", "3"], [APPROVE], [], [0.0], 0.0),
    ],
)
async def test_balanced_verdicts_are_trained_on_one_right_and_one_wrong_answer(
    solver: list[str], verifier: list[str], trained: list[float], others: list[float], trajectory: float
) -> None:
    policies = {"solver": in_turn(solver), "verifier": in_turn(verifier)}
    roles = {"unbalanced": "verifier"}
    episode = await play_team(play, PAYLOAD, policies, roles=roles, options=OPTIONS | {"balance": True})
    assert episode.of("verifier") == trained
    assert episode.of("unbalanced") == others
    assert len(episode.of("solver")) == len(solver)
    assert episode.reward == trajectory


async def test_all_verdicts_are_trained_after_many_episodes_without_both_classes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(solver_verifier, "_one_sided", solver_verifier.OneSided())
    found = []
    for answers in (["3", "3"], ["3", "3"], ["3", "3"], ["7", "3"], ["3", "3"]):
        policies = {"solver": in_turn([*answers, "3"]), "verifier": in_turn([REJECT, REJECT])}
        options = OPTIONS | {"balance": True, "balance_within": 2}
        episode = await play_team(play, PAYLOAD, policies, roles={"unbalanced": "verifier"}, options=options)
        found.append((len(episode.of("verifier")), len(episode.of("unbalanced")), episode.metrics["one_sided"]))
    assert found == [(0, 1, 0.0), (1, 0, 1.0), (1, 0, 1.0), (2, 0, 0.0), (0, 1, 0.0)]
    assert [record.message for record in caplog.records if "all verdicts are trained" in record.message] == [
        "no question had a right and a wrong answer in 2 episodes: all verdicts are trained until one has"
    ]


def test_balance_needs_a_role_whose_verdicts_are_not_trained() -> None:
    check_recipe(load_recipe("solver_verifier"))
    check_recipe(load_recipe("solver_verifier_gpu"))
    for wrong in ("untrained=[]", "roles={}", "roles={unbalanced: solver}"):
        with pytest.raises(ConfigError, match=r"options\.balance"):
            check_recipe(load_recipe("solver_verifier", [wrong]))


async def test_who_sees_what() -> None:
    episode = await played(["It is 3.", "7"], REJECT)
    first, second = episode.asked["solver"]
    (check,) = episode.asked["verifier"]
    assert "How many?" in first
    assert "verifier" not in first
    assert "How many?" in check
    assert "It is 3." in check
    assert "How many?" in second
    assert REJECT in second
    assert "It is 3." not in second, "a new sequence, not a continued one"


async def test_one_policy_plays_both_roles() -> None:
    say = in_turn(["3", REJECT, "7"])
    roles = {"solver": "model", "verifier": "model"}
    episode = await play_team(play, PAYLOAD, {"model": say}, roles=roles, options=OPTIONS)
    assert episode.of("solver") == [0.0, 1.0]
    assert episode.of("verifier") == [1.0]
    assert episode.rewards == {"model": 1.0}
    assert len(episode.samples) == 3


async def test_the_solver_has_to_be_the_first_policy() -> None:
    policies = {"verifier": in_turn([APPROVE]), "solver": in_turn(["7"])}
    with pytest.raises(WorkflowError, match="first policy is verifier"):
        await play_team(play, PAYLOAD, policies, options=OPTIONS)


async def test_prompts_of_the_recipe() -> None:
    prompts = {"solve": "Q {question}", "verify": "{question} {solution} {question}?"}
    episode = await played(["{question}"], APPROVE, prompts=prompts)
    assert "Q How many?<|im_end|>" in episode.asked["solver"][0]
    assert "How many? {question} How many??" in episode.asked["verifier"][0], "what is put in is no template"


async def test_settings_of_a_role_go_with_its_calls() -> None:
    episode = await played(["7"], APPROVE, settings={"verifier": {"temperature": 0.5}})
    temperatures = {s.policy: s.columns["temperatures"].max() for p in ("solver", "verifier") for s in _of(episode, p)}
    assert temperatures == {"solver": 1.0, "verifier": 0.5}


def _of(episode: TeamPlayed, policy: str) -> Any:
    return episode.record.samples(policy)


@pytest.mark.parametrize(("wrong", "named"), [({"chek": "math"}, "check"), ({"prompts": {"sole": ""}}, "sole")])
async def test_options_that_are_not_there(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        await play_team(play, PAYLOAD, {"solver": in_turn(["7"])}, options=wrong)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (APPROVE, "approve"),
        ("<verify>approve</verify> no: <VERIFY> Reject\n</VERIFY>", "reject"),
        ("approve", None),
        ("<verify>approve", None),
        ("", None),
    ],
)
def test_verdicts(text: str, verdict: str | None) -> None:
    assert verdict_of(text) == verdict
