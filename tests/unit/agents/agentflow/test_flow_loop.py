"""The loop: who speaks when, what ends it, and that nothing a model writes can break it."""

from __future__ import annotations

import pytest
from flow_world import COUNTS, FIRST, NO, PAID, PAYLOAD, SECOND, TRUTH, YES, played, says

from rillflow.agents.agentflow.labels import states_of
from rillflow.errors import ConfigError
from rillflow.examples import tally

SUM = f"{COUNTS[0]}+{COUNTS[1]}"
GOOD = (
    says("search", FIRST), NO, says("search", SECOND), NO, says("code", SUM), YES, says("answer", PAID),
)  # fmt: skip


async def test_planner_executor_and_verifier_find_the_answer() -> None:
    seen = await played(*GOOD)
    assert seen.answer == PAID
    assert tally.reward(PAYLOAD, seen.answer) == 1.0
    assert f"search {FIRST}: {COUNTS[0]}" in seen.script.prompts[2]
    assert f"code {SUM}: {TRUTH}" in seen.script.prompts[5]
    assert "only action left is answer" in seen.script.prompts[6]


async def test_every_answer_is_a_sequence_of_its_own_and_says_whose_it_is() -> None:
    seen = await played(*GOOD)
    agents = [sample.agent for sample in seen.record.samples("planner")]
    assert agents == ["planner", "verifier", "planner", "verifier", "planner", "verifier", "planner"]
    states = states_of(seen.record.transcript())
    assert [state.taken.action for state in states] == ["search", "search", "code", "answer"]
    assert f"search {FIRST}: {COUNTS[0]}" not in states[0].prompt
    assert f"search {FIRST}: {COUNTS[0]}" in states[1].prompt


async def test_an_answer_of_the_planner_ends_the_task_without_the_verifier() -> None:
    seen = await played(says("answer", "12"))
    assert seen.answer == "12"
    assert seen.record.calls == 1


async def test_what_is_malformed_is_asked_for_once_more() -> None:
    seen = await played("no JSON", says("answer", "7"))
    assert seen.answer == "7"
    assert seen.record.calls == 2
    assert seen.script.prompts[0] == seen.script.prompts[1]


async def test_two_malformed_answers_cost_a_step_and_nothing_else() -> None:
    bad = ("no JSON", says("fly", "away"))
    seen = await played(*bad, says("search", FIRST), NO, *bad, max_steps=3)
    assert seen.answer == str(COUNTS[0])  # the fallback: the last thing that a tool said


async def test_without_a_fallback_only_the_planner_answers() -> None:
    seen = await played(says("search", FIRST), says("think", "hm"), max_steps=2, verifier="none", fallback=False)
    assert seen.answer is None


async def test_an_episode_without_any_result_has_no_answer() -> None:
    seen = await played(says("search", "nowhere"), NO, says("think", "hm"), NO, max_steps=2)
    assert seen.answer is None
    assert "error: no nowhere box" in seen.script.prompts[2]


@pytest.mark.parametrize("verdict", ["yes", '{"sufficient": "true"}', '["sufficient"]', '{"sufficient": tr', ""])
async def test_a_verdict_that_is_no_clear_yes_means_go_on(verdict: str) -> None:
    seen = await played(says("search", FIRST), verdict, says("answer", "1"))
    assert seen.answer == "1"


async def test_a_final_answer_that_never_comes_falls_back() -> None:
    seen = await played(says("code", "1+1"), YES, says("think", "x"), "{", verifier="role")
    assert seen.answer == "2"


async def test_without_a_verifier_only_the_planner_speaks() -> None:
    seen = await played(says("search", FIRST), says("answer", "1"), verifier="none")
    assert {sample.agent for sample in seen.record.samples("planner")} == {"planner"}


async def test_actions_may_have_other_names_than_their_tools() -> None:
    seen = await played(says("look", FIRST), says("answer", "1"), verifier="none", actions={"look": "search"})
    assert f"look {FIRST}: {COUNTS[0]}" in seen.script.prompts[1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_step": 3}, "max_steps"),
        ({"actions": {"look": "telescope"}}, "search"),
        ({"actions": {"think": "code"}}, ""),
        ({"process_reward": {}}, "either model or continuations"),
        ({"process_reward": {"continuations": 2}}, "check"),
    ],
)
async def test_options_that_do_not_fit_are_refused_with_what_would(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await played(says("answer", "1"), **options)
    assert named in str(caught.value)


async def test_with_structured_output_the_engine_is_told_the_schema() -> None:
    seen = await played(says("search", FIRST), YES, says("answer", "1"), structured=True, longest=16)
    grammars = [request.sampling.grammar for request in seen.script.requests]
    assert all(grammar is not None for grammar in grammars)
    free, verdict, final = (str(grammar and grammar.text) for grammar in grammars)
    assert '"search"' in free
    assert "sufficient" in verdict
    assert '"search"' not in final
