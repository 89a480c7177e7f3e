from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rillflow.observe.metrics import MetricsReader, plot_reward, read_metrics, running_mean, summarise, summary_table
from rillflow.observe.run_view import Progress, sparkline
from rillflow.storage.startup import Starting
from rillflow.types import Evaluation, PolicyStatus, Status, UserError


def step(version: int, reward: float) -> dict[str, Any]:
    return {
        "policy": "agent", "step": version, "version": version, "time": 1.0, "reward": reward,
        "samples": 64,
        "staleness_mean": 1.0, "staleness_max": 2, "loss": 0.1,
    }  # fmt: skip


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "phase": "training", "reason": "", "steps": 3, "total_steps": 10, "versions": {"agent": 3}, "reward": 0.5,
        "samples_per_second": 40.0, "staleness": 1.2, "wait_fraction": 0.25, "counts": {"trained": 24},
        "evaluations": [Evaluation(version=0, reward=0.3, episodes=10, failed=0)], "nodes": 1,
        "waits": ["trainer agent: 3 of 8 groups ready"],
    }  # fmt: skip
    return Status(**(values | changes))


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_rollback_takes_steps_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step(1, 0.1), step(2, 0.2), {"event": "rollback", "policy": "agent", "version": 1}, step(3, 0.3)])
    write(path, [{"event": "evaluation", "version": 3, "reward": 0.9}])
    metrics = read_metrics(path, "agent")
    assert [s["version"] for s in metrics.steps] == [1, 3]
    assert len(metrics.rollbacks) == len(metrics.evaluations) == 1


def test_a_rollback_of_one_policy_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    other = [step(v, 0.5) | {"policy": "checker"} for v in (1, 2)]
    rounds = [{"event": "evaluation", "version": 2, "reward": 0.2}]
    write(path, [step(1, 0.1), *other, step(2, 0.2), *rounds])
    write(path, [{"event": "rollback", "policy": "checker", "version": 1}])
    metrics = read_metrics(path, "agent")
    assert [s["version"] for s in metrics.of("agent")] == [1, 2]
    assert [s["version"] for s in metrics.of("checker")] == [1]
    assert len(metrics.evaluations) == 1
    plot_reward(metrics, ["agent", "checker"], tmp_path / "reward.png", "test")


def test_reader_waits_for_whole_lines_and_skips_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert list(reader.new()) == []
    path.write_text('{"a": 1}\n{"b"')
    assert list(reader.new()) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"b": 2}\n{torn\n{"c": 3}\n')
    assert list(reader.new()) == [{"b": 2}, {"c": 3}]


def test_plot_and_summary(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step(v, v / 10) for v in range(1, 11)] + [{"event": "evaluation", "version": 10, "reward": 0.9}])
    metrics = read_metrics(path, "agent")
    plot_reward(metrics, ["agent"], tmp_path / "reward.png", "test")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    summary = summarise(metrics, status(steps=10, reason="done"), 20.0)
    assert summary["samples_trained"] == 640
    assert summary["samples_per_second"] == 32.0
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(summary, tmp_path, tmp_path / "reward.png"))
    assert "0.900 after" in console.file.getvalue()  # type: ignore[attr-defined]


def test_running_mean() -> None:
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_several_policies_are_shown_at_their_own_steps(terminal: bool) -> None:
    one = PolicyStatus(
        version=3, steps=3, total_steps=10, reward=None, staleness=0.0, wait_fraction=0.0, samples_per_second=0.0,
        ready=1,
    )  # fmt: skip
    policies = {"solver": one, "checker": msgspec.structs.replace(one, steps=7, reward=0.25)}
    output = io.StringIO()
    console = Console(file=output, width=160, force_terminal=terminal)
    with Progress("title", console) as progress:
        progress.show(status(policies=policies))
    assert "checker" in output.getvalue()
    assert "7/10" in output.getvalue()


def test_failed_episodes_are_counted_where_people_look(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    failed = {"failures_in_a_row": 2, "failures.reward_error": 5, "failures.timeout": 1}
    ends = {"trained": 24, "expired": 2, "expired.run_ended": 2, "filtered": 4, "filtered.zero_variance": 4}
    others = {"admitted": 460, "eval.evaluated": 8, "late": 3, "ended.agent_error": 3}
    seen = status(counts=ends | others | failed)
    line = Progress("run", console)._line(seen)
    assert "failed episodes 6 (reward_error 5, timeout 1)" in line
    assert "rewarded ends agent_error 3" in line
    assert "failed" not in Progress("run", console)._line(status())
    console.print(summary_table(summarise(read_metrics(tmp_path / "none", "agent"), seen, 1.0), tmp_path, None))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "reward_error 5, timeout 1; each traceback is in" in told
    assert "failures_in_a_row" not in told
    assert "`ends` can make such an end a reward" in told
    assert (
        "460 admitted: 24 trained, 4 filtered (zero_variance 4), 2 expired (run_ended 2); held out: evaluated 8" in told
    )
    assert "late 3" in told
    assert told.count("agent_error 3") == 1


def test_a_note_is_said_once() -> None:
    noted = status(notes={"forks": "every call begins a new path"})
    assert shown(noted, noted, parts=[]).count("note: every call begins a new path") == 1


def test_the_summary_tells_forks_and_tokens_of_an_episode(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    measured = {"episode/forks": 2.0, "episode/tokens_forwarded": 300.0, "episode/tokens_trained": 9.0}
    write(path, [step(1, 0.1) | measured, step(2, 0.2) | measured | {"episode/forks": 3.0}, step(3, 0.3)])
    summary = summarise(read_metrics(path, "agent"), status(notes={"forks": "why"}), 1.0)
    assert summary["paths"] == {"forks": 2.5, "tokens_forwarded": 300.0, "tokens_trained": 9.0}
    assert summary["notes"] == {"forks": "why"}
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(summary, tmp_path, None))
    assert "2.5 forks, 300 tokens forwarded for 9 trained" in console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_progress_prints_lines() -> None:
    console = Console(file=io.StringIO(), width=200)
    with Progress("run", console) as progress:
        progress.show(status())
        progress.show(status(phase="ended"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3/10" in text
    assert "(trainer agent: 3 of 8 groups ready)" in text


STARTING = [Starting("trainer-agent", "loading the model", 2.0), Starting("rollout-0", "importing torch", 11.6)]
PARTS = "trainer-agent: loading the model; rollout-0: importing torch (12 s)"


def shown(*statuses: Status, parts: list[Starting] = STARTING, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=terminal)
    with Progress("run", console, target=0.9) as progress:
        progress.starting(parts)
        for found in statuses:
            progress.show(found)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_starts_says_what_each_part_does(terminal: bool) -> None:
    text = shown(terminal=terminal)
    assert "starting (0 s): " in text
    assert PARTS in text


def test_a_run_without_samples_shows_its_start_and_no_empty_numbers() -> None:
    early = status(steps=0, reward=None, evaluations=[], phase="training", waits=["waiting for the first rollout node"])
    console = Console(file=io.StringIO(), width=160)
    progress = Progress("run", console)
    progress._parts = STARTING
    assert progress._line(early) == f"starting (0 s): {PARTS}"
    progress._parts = []
    assert "step 0/10" in progress._line(early)
    assert "(waiting for the first rollout node)" in progress._line(early)


def test_a_process_that_is_started_again_is_shown_beside_the_numbers() -> None:
    again = [Starting("trainer-agent", "loading the model", 6.2)]
    text = shown(status(phase="training"), parts=again, terminal=True)
    assert "starting: trainer-agent: loading the model (6 s)" in text
    assert "3/10" in text
    progress = Progress("run", Console(file=io.StringIO(), width=160))
    progress._parts = again
    line = progress._line(status(phase="training"))
    assert "step 3/10" in line
    assert "(starting: trainer-agent: loading the model (6 s))" in line


def test_a_run_that_has_ended_waits_for_no_process() -> None:
    text = shown(status(phase="ended"))
    assert "step 3/10" in text
    assert text.count("trainer-agent") == 1, "only in the line before any status"


def test_the_target_stands_beside_the_held_out_reward() -> None:
    assert "(the run ends at 0.9)" in shown(status(), parts=[], terminal=True)


def test_the_summary_says_whether_the_target_was_reached(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rounds = [(0, 0.2, 0), (2, 0.9, 1), (4, 0.8, 0), (6, None, 8)]
    write(
        path,
        [
            {"event": "evaluation", "step": step, "version": step, "reward": reward, "failed": failed}
            for step, reward, failed in rounds
        ],
    )
    metrics = read_metrics(path, "agent")
    console = Console(file=io.StringIO(), width=120)
    for target in (0.9, 0.5, None):
        summary = summarise(metrics, status(reason="done"), 1.0, target=target)
        console.print(summary_table(summary, tmp_path, None))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.9 was not reached" in text, "a round with a failed episode does not count"
    assert "0.5 was reached by version 4 (step 4)" in text
    assert text.count("│ target ") == 2


def test_live_progress_shows_everything() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Progress("run", console) as progress:
        progress.show(status())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("reward", "samples/s", "staleness", "wait", "held-out reward at version 0"):
        assert word in text


def test_a_rollback_takes_back_what_was_measured_of_dead_versions(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rounds = [{"event": "evaluation", "version": v, "reward": v / 10} for v in (0, 2)]
    write(
        path, [rounds[0], step(1, 0.1), step(2, 0.2), rounds[1], {"event": "rollback", "policy": "agent", "version": 1}]
    )
    assert [e["version"] for e in read_metrics(path, "agent").evaluations] == [0]


def test_an_evaluation_whose_episodes_all_failed_is_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"event": "evaluation", "version": 0, "reward": None}, step(1, 0.1)])
    write(path, [{"event": "evaluation", "version": 1, "reward": 0.5}])
    metrics = read_metrics(path, "agent")
    plot_reward(metrics, ["agent"], tmp_path / "reward.png", "test")
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(summarise(metrics, status(reason="done"), 1.0), tmp_path, None))
    assert "– before, 0.500 after" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_rate_of_a_resumed_run_is_that_of_the_part_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [step(1, 0.1) | {"time": 50.0}, step(2, 0.2) | {"time": 110.0}])
    summary = summarise(read_metrics(path, "agent"), status(), 32.0, since=100.0)
    assert summary["samples_trained"] == 128
    assert summary["samples_per_second"] == 2.0


def test_the_summary_says_how_far_engine_and_trainer_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    seen = [
        {"tokens": 100.0, "mean": 0.01, "max": 0.2, "ratio": 1.0},
        {"tokens": 300.0, "mean": 0.03, "max": 0.1, "ratio": 0.96},
    ]
    write(path, [step(0, 0.1) | {"consistency/tokens": 0.0}])  # no fresh token
    assert summarise(read_metrics(path, "agent"), status(), 1.0)["consistency"] is None
    write(path, [step(n, 0.1) | {f"consistency/{k}": v for k, v in one.items()} for n, one in enumerate(seen, 1)])
    summary = summarise(read_metrics(path, "agent"), status(), 1.0)
    assert summary["consistency"] == pytest.approx({"mean": 0.025, "max": 0.2, "ratio": 0.97, "tokens": 400.0})
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(summary_table(summary, tmp_path, None))
    assert "log-probs 0.025 apart on average, 0.2 at most, ratio 0.9700 (400 fresh tokens)" in console.export_text()


@pytest.mark.parametrize("terminal", [False, True])
def test_an_error_of_user_code_is_shown_once_with_its_traceback_and_counted(tmp_path: Path, terminal: bool) -> None:
    error = UserError(
        kind="workflow_error", where="KeyError play.py:3 in play", error="KeyError: 'qestion' (play.py:3 in play)",
        trace="Traceback (most recent call last):\n  payload['qestion']\nKeyError: 'qestion'",
    )  # fmt: skip
    tool = UserError(
        kind="tool count", where="ValueError count.py:9 in count", error="ValueError: 7", trace="at count.py"
    )
    output = io.StringIO()
    console = Console(file=output, width=160, force_terminal=terminal)
    with Progress("title", console) as progress:
        progress.show(status(errors=[error]))
        progress.show(status(errors=[msgspec.structs.replace(error, count=64), tool]))
    told = output.getvalue()
    assert told.count("payload['qestion']") == told.count("at count.py") == 1
    assert "workflow_error, once: KeyError: 'qestion' (play.py:3 in play)" in told

    last = status(errors=[msgspec.structs.replace(error, count=64), tool], phase="ended")
    assert "errors of user code 65" in Progress("title", Console(file=io.StringIO()))._line(last)
    summary = summarise(read_metrics(tmp_path / "none", "agent"), last, 1.0)
    assert [(one["kind"], one["count"]) for one in summary["errors"]] == [("workflow_error", 64), ("tool count", 1)]
    table = Console(file=io.StringIO(), width=160)
    table.print(summary_table(summary, tmp_path, None))
    shown = table.file.getvalue()  # type: ignore[attr-defined]
    assert "workflow_error, 64 times: KeyError: 'qestion'" in shown
    assert shown.count("payload['qestion']") == 1
