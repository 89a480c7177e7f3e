"""The rules on facts of real runs (`advisory_facts/`), on changes of them, and on whatever a file may hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rillflow.config import load_recipe
from rillflow.dataflow.ledger_facts import EpisodeFacts, LedgerFacts, NodeFacts, SampleFacts
from rillflow.observe.advisories import FactReader, Facts, advise
from rillflow.observe.advisories.advisory import LARGEST, THRESHOLDS, AnswerFacts, Evaluation, Refusal, Step
from rillflow.observe.advisories.fact_reader import Answer, StepReader, summed_up
from rillflow.runtime.folder import RunFolder
from rillflow.storage.trajectories import Bounds, TrajectoryStore
from rillflow.storage.trajectory_format import FILE, KINDS, Trajectory, TrajectoryInfo
from rillflow.types import UserError
from soak import repetitions

FIXTURES = Path(__file__).parent / "advisory_facts"
DOCS = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
# The runs of tests/integration/test_broken_runs.py, and the rule that must speak first of each.
BROKEN = {
    "zero_reward": "equal_rewards",
    "length_hack": "length_hack",
    "high_rate": "learning_rate",
    "hanging_tool": "hanging_tool",
    "slow_node": "slow_node",
    "full_disk": "full_disk",
    "forking_template": "forks",
    "wrong_weights": "refused_weights",
    "raising_workflow": "user_error",
}
HEALTHY = tuple(path.stem for path in FIXTURES.glob("*.json") if path.stem not in BROKEN)


def facts_of(name: str) -> Facts:
    return msgspec.json.decode((FIXTURES / f"{name}.json").read_bytes(), type=Facts)


def keys(facts: Facts) -> list[str]:
    return [advisory.key for advisory in advise(facts)]


@pytest.mark.parametrize(("name", "key"), BROKEN.items())
def test_the_first_advisory_of_a_broken_run_names_its_cause(name: str, key: str) -> None:
    first = advise(facts_of(name))[0]
    assert first.key == key
    assert first.severity != "hint"
    assert any(letter.isdigit() for letter in first.title), "a number is behind it"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_hints_at_most(name: str) -> None:
    assert [advisory for advisory in advise(facts_of(name)) if advisory.severity != "hint"] == []


# ---------------------------------------------------------------- one rule at a time, on changes of a healthy run

HEALTHY_RUN = facts_of("ppo_colocated")
STEPS = HEALTHY_RUN.policies["agent"]
SAMPLES = HEALTHY_RUN.ledger.samples["agent"]


def stepped(**last: Any) -> Facts:
    """The healthy run, whose second half of steps is changed."""
    half = len(STEPS) // 2
    return replace(HEALTHY_RUN, policies={"agent": [*STEPS[:half], *(replace(step, **last) for step in STEPS[half:])]})


def torn_apart() -> Facts:
    """A policy that huge updates have left with one answer, for no reward; later updates change nothing."""
    third = len(STEPS) // 3
    torn = [replace(step, approx_kl=20.0) for step in STEPS[third : 2 * third]]
    still = [replace(step, approx_kl=0.0, entropy=0.0, reward=0.0, grad_norm=0.0) for step in STEPS[2 * third :]]
    return replace(HEALTHY_RUN, policies={"agent": [*STEPS[:third], *torn, *still]})


def with_ledger(facts: Facts = HEALTHY_RUN, **changes: Any) -> Facts:
    return replace(facts, ledger=replace(facts.ledger, **changes))


def sampled(**changes: Any) -> Facts:
    return with_ledger(samples={"agent": replace(SAMPLES, **changes)})


def node(name: str, pace: float | None, completed: int = 20, failed: int = 0, state: str = "healthy") -> NodeFacts:
    return NodeFacts(name, state, HEALTHY_RUN.now, completed, failed, pace, {"agent": 8})


def live(**changes: Any) -> Facts:
    times = [step.time for step in STEPS if step.time is not None]
    return replace(HEALTHY_RUN, **({"state": "running", "reason": "", "live": True, "now": times[-1]} | changes))


RULES = {
    "gradients that are not finite": (stepped(skipped=1.0), "learning_rate"),
    "huge updates and a fallen reward": (stepped(approx_kl=2.0, reward=0.0), "learning_rate"),
    "huge updates of which nothing is left": (torn_apart(), "learning_rate"),
    "huge updates that pay": (stepped(approx_kl=2.0), None),
    "entropy that collapses": (stepped(entropy=0.001, reward=0.2), "entropy_collapse"),
    "entropy that falls while the reward rises": (stepped(entropy=0.001, reward=1.0), None),
    "answers that collapse": (stepped(response_length=1.0, reward=0.2), "length_collapse"),
    "numerics": (stepped(apart=0.2), "apart"),
    "equal rewards": (sampled(lowest=0.0, highest=0.0, mean=0.0), "equal_rewards"),
    "a few equal rewards": (sampled(lowest=0.0, highest=0.0, count=64), None),
    "a solved task": (sampled(lowest=1.0, highest=1.0, mean=1.0), "solved"),
    "answers that are cut": (sampled(truncated=0.7), "truncated"),
    "length that pays without growth": (sampled(by_length=0.95), None),
    "a slow node": (with_ledger(nodes=[node("a", 1.0), node("b", 1.2), node("c", 9.0)]), "slow_node"),
    "nodes of about one pace": (with_ledger(nodes=[node("a", 1.0), node("b", 2.5)]), None),
    "a node that has hardly played": (with_ledger(nodes=[node("a", 1.0), node("b", 9.0, completed=2)]), None),
    "a failing node": (with_ledger(nodes=[node("a", 1.0), node("b", 1.0, 4, 16)]), "failing_node"),
    "nodes that all fail": (with_ledger(nodes=[node("a", 1.0, 4, 16), node("b", 1.0, 4, 16)]), None),
    "a node that is gone": (with_ledger(live(), nodes=[node("a", 1.0), node("b", 1.0, state="gone")]), "lost_node"),
    "a node far behind": (with_ledger(live(), nodes=[node("a", 1.0)], heads={"agent": 40}), "stale_node"),
    "a stall": (live(now=HEALTHY_RUN.now + 600, waits=["2 of 4 groups ready"]), "stall"),
    "a live run": (live(), None),
    "a run that goes on after a day": (live(now=HEALTHY_RUN.now + 86400, started=HEALTHY_RUN.now + 86390), None),
    "a run that was killed": (live(live=False, now=HEALTHY_RUN.now + 600), "silent"),
    "a run that starts": (live(live=False, held=True, now=HEALTHY_RUN.now + 600), None),
    "a full disk": (live(disk_free=0.001), "full_disk"),
    "a run that ended before the disk was full": (replace(HEALTHY_RUN, disk_free=0.001), None),
    "a run that failed": (replace(HEALTHY_RUN, state="failed", reason="no batch within 600 s"), "failed"),
    "episodes that overflow": (
        with_ledger(completed=30, failed=20, counters={"failures.context_overflow": 20}),
        "failed_episodes",
    ),
    "episodes at their deadline": (
        with_ledger(completed=30, failed=20, counters={"failures.timeout": 20}),
        "hanging_tool",
    ),
    "model calls at the deadline": (
        with_ledger(
            completed=30,
            failed=20,
            counters={"failures.timeout": 20},
            last_failure="timeout: the workflow took longer than 60 s, waiting for the model's answer",
        ),
        "slow_model",
    ),
    "rewarded deadlines": (with_ledger(completed=30, counters={"ended.timeout": 20}), "hanging_tool"),
    "an accident": (with_ledger(completed=1000, failed=3, counters={"failures.timeout": 3}), None),
    "a raising reward": (
        with_ledger(completed=30, errors=[UserError(kind="reward_error", where="x", error="KeyError: 'a'", count=20)]),
        "user_error",
    ),
    "a rare error": (
        with_ledger(completed=300, errors=[UserError(kind="tool f", where="x", error="KeyError: 'a'", count=20)]),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "key"), RULES.values(), ids=RULES)
def test_each_rule_speaks_where_it_should(facts: Facts, key: str | None) -> None:
    found = [advisory.key for advisory in advise(facts) if advisory.severity != "hint" or advisory.key == key]
    assert found[:1] == ([key] if key else [])


@pytest.mark.parametrize("cause", ["numerics", "stale weights", "wrong weights", "cut distribution"])
def test_refused_weights_come_with_their_cause_and_its_cure(cause: str) -> None:
    facts = replace(HEALTHY_RUN, refusals=[Refusal("rollout-1", "agent", 3, cause, "0.9 nats from the trainer's")])
    first = advise(facts)[0]
    assert cause in first.title
    assert "rollout-1" in first.title
    assert first.what_to_do


@pytest.mark.parametrize(
    ("probed", "step", "cause"),
    [
        (True, {"apart": 0.2, "shift": 0.01}, "numerics"),
        (True, {"apart": 0.1, "shift": -0.09}, "a cut distribution"),
        (True, {"apart": 1.5, "shift": -1.4}, "a cut distribution"),
        (False, {"apart": 1.5, "shift": -1.4}, "wrong weights"),
        (False, {"apart": 0.2, "shift": -0.05, "stale_apart": 0.22}, "stale weights"),
        (False, {"apart": 0.2, "shift": -0.05, "stale_apart": 0.01}, "numerics"),
    ],
)
def test_a_difference_of_engine_and_trainer_comes_with_its_likely_cause(
    probed: bool, step: dict[str, float], cause: str
) -> None:
    facts = stepped(**step)
    facts = replace(facts, settings=replace(facts.settings, probed={"agent": probed}, cuts={"agent": "top_p 0.9"}))
    (first,) = (one for one in advise(facts) if one.key == "apart")
    assert first.title.endswith(f"most likely because of {cause}.")
    assert ("top_p 0.9" in first.why) is (cause == "a cut distribution")
    assert first.what_to_do


def said(*texts: str, cut: bool = False) -> dict[str, AnswerFacts]:
    """Return the facts of these answers, each given four times, to different prompts."""
    every = [text for text in texts for _ in range(4)]
    return {"agent": summed_up([Answer(f"t{n}", f"p{n}", "agent", text, cut) for n, text in enumerate(every)])}


LOOP = "It is blue" + " and blue" * 9
DIFFERENT = [f"There are {n} keys in the {n}. box." for n in range(4)]


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        (LOOP, True),
        ("blueblueblueblueblueblueblu", True),
        ("no no no", False),  # too short to tell
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", False),
        ("The answer is that there are seventeen boxes.", False),
    ],
)
def test_an_answer_that_repeats_itself(text: str, repeats: bool) -> None:
    assert Answer("t", "p", "agent", text, cut=False).repeats is repeats


def test_kept_answers_name_the_cause() -> None:
    cut = sampled(truncated=0.9)
    assert "because they repeat themselves" in advise(replace(cut, answers=said(*[LOOP] * 4, cut=True)))[0].title
    assert "because" not in advise(replace(cut, answers=said(*DIFFERENT, cut=True)))[0].title
    equal = sampled(lowest=0.0, highest=0.0, mean=0.0)
    first = advise(replace(equal, answers=said(*["no idea"] * 4)))[0]
    assert "16 of 16 kept answers to 16 prompts are 'no idea'" in first.why
    assert "higher temperature" in first.what_to_do
    assert "kept answers" not in advise(replace(equal, answers=said(*DIFFERENT)))[0].why
    assert keys(replace(HEALTHY_RUN, answers=said(*[LOOP] * 3, "once"))) == ["repeated_answers"]
    assert keys(replace(HEALTHY_RUN, answers=said(LOOP, LOOP, LOOP))) == [], "12 answers are too few to tell"


def test_answers_are_read_from_the_kept_trajectories(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    reader = FactReader(folder)
    assert reader.read().answers == {}
    store = TrajectoryStore(folder.root / FILE, Bounds(1 << 24, dict.fromkeys(KINDS, 100)))
    for n in range(20):
        known = TrajectoryInfo(
            id=f"t{n}", time=float(n), lane="train", status="done", kept="best" if n < 2 else "sample", prompt=f"p{n}"
        )
        spoken = [{"role": "user", "content": "?"}, {"role": "assistant", "content": LOOP if n % 2 else f"{n}"}]
        path = {"policy": "agent", "follows": None, "shared": 0, "messages": spoken, "finish": "length"}
        store.add(Trajectory(known, paths=[path]))
    store.close()
    found = reader.read()
    assert found.unread == []
    agent = found.answers["agent"]
    assert (agent.count, agent.prompts, agent.repeating, agent.cut, agent.same) == (18, 18, 9, 18, 9)
    assert "(t19)" in agent.repeated
    assert reader.read().answers == found.answers


def test_hints_are_given_to_healthy_runs_only() -> None:
    waits = replace(HEALTHY_RUN, settings=replace(HEALTHY_RUN.settings, on_policy=False))
    waits = replace(waits, policies={"agent": [replace(step, wait_fraction=0.8) for step in STEPS]})
    assert keys(waits) == ["trainer_waits"]
    assert keys(replace(waits, ledger=replace(waits.ledger, samples={"agent": replace(SAMPLES, truncated=0.9)}))) == [
        "truncated"
    ]
    stale = with_ledger(groups={"trained": 50, "expired.stale": 50, "expired": 50})
    assert "dropped_stale" in keys(stale)
    assert "flat_groups" in keys(with_ledger(groups={"trained": 10, "filtered.zero_variance": 50, "filtered": 50}))


def test_problems_come_before_warnings() -> None:
    facts = with_ledger(stepped(skipped=1.0), nodes=[node("a", 1.0), node("b", 20.0)])
    assert [advisory.severity for advisory in advise(facts)] == ["problem", "warning"]


def test_forks_by_design_are_a_hint() -> None:
    def forking(cause: str) -> Facts:
        note = f"every call of an episode begins a new path: {cause}; 3 calls made 3 samples"
        return with_ledger(notes={"forks": note}, episodes=EpisodeFacts(8, 3.0, 1.0, 2.0, 300.0, 60.0))

    apart = "the user's message differs: content of messages[0] differs at character 9: 'a' instead of 'b'"
    assert [advisory.severity for advisory in advise(forking(apart))] == ["hint"]
    system = "the client changes the system prompt: content of messages[0] differs at character 9"
    assert [advisory.severity for advisory in advise(forking(system))] == ["warning"]


def test_the_docs_have_every_threshold_with_its_reason() -> None:
    text = DOCS.read_text()
    for name, (value, reason) in THRESHOLDS.items():
        assert f"| `{name}` | {value:g} | {reason} |" in text, name


# ---------------------------------------------------------------- whatever a file may hold

NUMBERS = st.one_of(st.none(), st.floats(), st.integers(), st.booleans(), st.text(max_size=3))
LINES = st.one_of(
    st.binary(max_size=40),
    st.fixed_dictionaries(
        {},
        optional={
            **{field.encode_name: NUMBERS for field in msgspec.structs.fields(Step)},
            "policy": st.one_of(st.sampled_from(["a", "b"]), NUMBERS),
            "event": st.one_of(st.sampled_from(["evaluation", "rollback", "balance"]), NUMBERS),
            "version": NUMBERS,
        },
    ).map(lambda line: json.dumps(line).encode()),
    st.one_of(NUMBERS, st.lists(NUMBERS)).map(lambda value: json.dumps(value).encode()),
)


@given(lines=st.lists(LINES, max_size=30), torn=st.booleans())
def test_no_metrics_file_makes_advice_raise(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], torn: bool
) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"" if torn else b"\n"))
    steps = StepReader(path)
    steps.follow()
    advise(Facts(now=1.0, policies=steps.policies(), heldout=steps.heldout))


FLOATS = st.one_of(st.none(), st.floats(-LARGEST, LARGEST))
FACTS = st.builds(
    Facts,
    now=st.floats(0, 2e9),
    state=st.sampled_from(["new", "running", "finished", "failed", "stopped"]),
    live=st.booleans(),
    policies=st.dictionaries(
        st.sampled_from(["a", "b", ""]),
        st.lists(
            st.builds(Step, st.integers(0, 99), **{f.name: FLOATS for f in msgspec.structs.fields(Step)[1:]}),
            max_size=12,
        ),
    ),
    heldout=st.lists(st.builds(Evaluation, st.integers(0, 9), st.floats(-1, 1)), max_size=3),
    ledger=st.builds(
        LedgerFacts,
        completed=st.integers(0, 999),
        failed=st.integers(0, 999),
        counters=st.dictionaries(
            st.sampled_from(["failures.timeout", "failures.x", "ended.timeout"]), st.integers(0, 99)
        ),
        notes=st.dictionaries(st.just("forks"), st.text()),
        errors=st.lists(
            st.builds(
                UserError, kind=st.sampled_from(["timeout", "slow tool f", "tool f"]), where=st.text(), error=st.text()
            ),
            max_size=2,
        ),
        nodes=st.lists(
            st.builds(
                NodeFacts, st.sampled_from(["m", "n"]), st.sampled_from(["healthy", "gone", "left"]), st.floats(0, 2e9),
                st.integers(0, 9), st.integers(0, 9), st.one_of(st.none(), st.floats(0, 1e9)),
                st.dictionaries(st.just("a"), st.integers(0, 99)),
            ),
            max_size=4,
        ),
        samples=st.dictionaries(
            st.just("a"),
            st.builds(SampleFacts, st.integers(1, 999), st.integers(1, 64), *[st.floats(-1, 1)] * 3, st.floats(0, 99),
                      st.floats(0, 1), st.one_of(st.none(), st.floats(-1, 1))),
        ),
        episodes=st.one_of(st.none(), st.builds(EpisodeFacts, st.integers(1, 99), *[st.floats(0, 99)] * 5)),
    ),
    disk_free=st.one_of(st.none(), st.floats(0, 1)),
    idle=st.dictionaries(st.sampled_from(["rollout-0", "trainer"]), st.floats(0, 1)),
)  # fmt: skip


@settings(max_examples=repetitions(20, 100))
@given(facts=FACTS)
def test_no_facts_make_advice_raise(facts: Facts) -> None:
    found = advise(facts)
    severities = [advisory.severity for advisory in found]
    assert severities == sorted(severities, key=("problem", "warning", "hint").index)
    assert "hint" not in severities or set(severities) == {"hint"}
    assert all(advisory.title and advisory.what_to_do for advisory in found)


def test_a_policy_that_was_rolled_back_has_the_steps_of_the_line_that_lives(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [{"policy": "agent", "step": n, "reward": 0.1 * n, "time": float(n)} for n in (1, 2, 3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in _rolled_back(steps)) + '{"step": 4')
    reader = StepReader(path)
    reader.follow()
    found = reader.policies()["agent"]
    assert [step.step for step in found] == [1, 2]
    assert found[-1].reward == 0.9


def _rolled_back(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rollback = {"event": "rollback", "policy": "agent", "version": 1, "step": 1}
    return [*steps, rollback, {**steps[1], "reward": 0.9}]


# ---------------------------------------------------------------- folders


def test_a_new_run_has_nothing_to_tell(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    facts = FactReader(folder).read(now=folder.started)
    assert facts.unread == []
    assert facts.settings.max_tokens == {"agent": 32}
    assert advise(facts) == []


def test_what_cannot_be_read_is_listed_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    folder.ledger.write_bytes(b"not a database" * 100)
    folder.metrics.write_text('{"policy": "agent", "step": 1, "reward": 0.5}\n')
    facts = FactReader(folder).read(now=folder.started)
    assert [step.reward for step in facts.policies["agent"]] == [0.5]
    assert len(facts.unread) == 1
    assert "ledger" in facts.unread[0]


def test_a_run_is_followed_as_it_grows(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    reader = FactReader(folder)
    lines = [json.dumps({"policy": "agent", "step": n, "reward": 0.1 * n}) + "\n" for n in range(1, 700)]
    spans = ['["idle", 0.0, 1.0]\n', '["rollout", 1.0, 2.0]\n', '["rollout", 2.0, 4.0]\n']
    log = "policy agent: version 3 not loaded, it waits: version 3 is not served, numerics: far apart\n"
    (folder.root / "timeline").mkdir()
    written = {folder.metrics: lines, folder.root / "timeline" / "rollout-0.jsonl": spans, folder.log("engine"): [log]}
    for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        for path, content in written.items():
            with open(path, "a") as file:
                file.write("".join(content[part]))
        found = reader.read(now=folder.started)
        fresh = FactReader(folder).read(now=folder.started)
        assert replace(found, disk_free=None) == replace(fresh, disk_free=None), "it knows what a new reader finds"
    steps = [step.step for step in found.policies["agent"]]
    assert (steps[0], steps[-1], len(steps)) == (1, 699, 512)
    assert found.idle == {"rollout-0": 0.25}
    assert [one.cause for one in found.refusals] == ["numerics"]


def test_logs_tell_of_refused_weights_until_they_are_served(tmp_path: Path) -> None:
    folder = RunFolder.create(load_recipe("quickstart"), tmp_path)
    refused = (
        "2026-01-01 WARNING rillflow.weights.refresh: policy agent: version 3 not loaded, the engine samples nothing: "
        "version 3 is not served, wrong weights: its log-probs of the probe are 2 nats from the trainer's\n"
    )
    served = "2026-01-01 INFO rillflow.weights.refresh: policy agent: version 4, delta, 99 bytes: fetched in 0.1 s\n"
    folder.log("rollout-0").write_text(refused + served)
    folder.log("rollout-1").write_text(served + refused + "OSError: [Errno 28] No space left on device\n")
    facts = FactReader(folder).read(now=folder.started)
    assert [(one.worker, one.version, one.cause) for one in facts.refusals] == [("rollout-1", 3, "wrong weights")]
    assert facts.no_space.startswith("rollout-1.log: OSError")
