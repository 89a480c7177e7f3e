"""The panels of run folders: whole ones, young ones, torn ones and those of other kinds of runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboard_run import STARTED, make_run, step_line, write_lines, write_spans

from rillflow.config.supervised import load_fit
from rillflow.dashboard.readers import Lanes, Spans
from rillflow.dashboard.views.charts import Window
from rillflow.dashboard.views.flow import flow
from rillflow.dashboard.views.nodes import nodes
from rillflow.dashboard.views.overview import metrics, overview
from rillflow.dashboard.views.records import bars, log_files, log_lines, shares, timeline
from rillflow.dashboard.watched import WatchedRun, watch
from rillflow.errors import BadRequest, ConfigError, CorruptData, RunError
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import STATES, Span

WIDE = Window(width=400)


def watched(folder: RunFolder) -> WatchedRun:
    return WatchedRun(folder, folder.root.name, clock=lambda: STARTED + 100.0)


def test_the_overview_of_a_finished_run(tmp_path: Path) -> None:
    shown = overview(watched(make_run(tmp_path)), None, WIDE)
    assert shown["run"]["state"] == "finished"
    assert shown["run"]["ended"] - shown["run"]["started"] == 90.0
    figures = {one["name"]: one for one in shown["figures"]}
    assert figures["step"]["value"] == 5.0
    assert figures["reward"]["value"] == 0.5
    assert figures["held-out"]["value"] == 0.25
    charts = {chart.key: chart for chart in shown["charts"]}
    assert {"reward", "loss", "entropy", "length", "staleness", "wait", "samples"} <= set(charts)
    assert "mfu" not in charts
    assert [line.name for line in charts["reward"].lines] == ["agent", "held-out"]
    assert [line.name for line in charts["staleness"].lines] == ["staleness_mean", "staleness_max"]


def test_rewards_are_shown_for_each_policy_and_role(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "solver_verifier", steps=0)
    roles = {"episode/role_reward/solver": 0.2, "episode/role_reward/verifier": 0.4}
    write_lines(folder, [step_line(n, policy, **roles) for n in (1, 2) for policy in ("solver", "verifier")])
    reward = overview(watched(folder), None, WIDE)["charts"][0]
    assert [line.name for line in reward.lines] == ["solver", "verifier", "role solver", "role verifier", "held-out"]


def test_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    run = watched(RunFolder.create(load_recipe_quickstart(), tmp_path))
    shown = overview(run, None, WIDE)
    assert shown["run"]["state"] == "new"
    assert shown["figures"] == []
    assert timeline(run, 500)["lanes"] == []
    assert flow(run)["prompts"] is None
    assert nodes(run, None)["nodes"] == []
    assert log_files(run)["files"] == []


def load_recipe_quickstart():
    from rillflow.config import load_recipe

    return load_recipe("quickstart")


def test_a_supervised_run_has_its_curves(tmp_path: Path) -> None:
    folder = RunFolder.create(load_fit("sft", ()), tmp_path)
    write_lines(folder, [{"step": n, "time": STARTED + n, "loss": 1.0 / n} for n in (1, 2)])
    shown = overview(watched(folder), None, WIDE)
    assert [chart.key for chart in shown["charts"] if chart.lines] == ["loss"]


def test_a_window_of_time_or_steps(tmp_path: Path) -> None:
    run = watched(make_run(tmp_path, steps=50))
    loss = next(chart for chart in overview(run, None, Window(low=20, high=22))["charts"] if chart.key == "loss")
    assert [x for x, _ in loss.lines[0].points] == [19.0, 20.0, 21.0, 22.0, 23.0]
    late = metrics(run, ["loss", "no such"], Window(axis="time"))
    assert [chart.key for chart in late["charts"]] == ["loss"]
    assert late["charts"][0].lines[0].points[0][0] == 10.0


def test_the_timeline_has_a_lane_for_each_worker(tmp_path: Path) -> None:
    shown = timeline(watched(make_run(tmp_path)), 500)
    assert shown["seconds"] == 3.0  # from the first thing that anybody did
    lanes = {lane["worker"]: lane for lane in shown["lanes"]}
    assert lanes["rollout-0"]["shares"]["idle"] == 0.0
    assert lanes["trainer-agent"]["shares"]["idle"] == pytest.approx(1 / 3)
    assert lanes["rollout-0"]["bars"][-1] == ("load", 2.0, 3.0)


def test_many_spans_are_drawn_as_pixels() -> None:
    spans = [Span("train" if n % 2 else "rollout", n, n + (0.9 if n % 2 else 1.0)) for n in range(1000)]
    drawn = bars(Spans.of(spans), 0.0, 0.0, 1000.0, 100)
    assert 1 <= len(drawn) <= 100
    assert {state for state, _, _ in drawn} == {"rollout"}  # which fills more of every ten seconds
    assert drawn[-1][2] == pytest.approx(1000.0)
    exact = bars(Spans.of(spans), 0.0, 10.5, 12.0, 100)
    assert exact == [("rollout", 10.5, 11.0), ("train", 11.0, 11.9)]
    assert shares(Spans.of(spans), 0.0, 1000.0)["idle"] == pytest.approx(0.05)


def test_lanes_follow_a_file_that_is_turned_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lanes = Lanes(folder.root)
    assert len(lanes.follow()["trainer-agent"]) == 1
    write_spans(folder, "trainer-agent", [("idle", 4.0, 5.0), ("idle", 5.0, 5.5)])
    path = folder.root / "timeline" / "trainer-agent.jsonl"
    path.replace(path.with_name("trainer-agent.jsonl.1"))
    write_spans(folder, "trainer-agent", [("train", 5.5, 6.0)])
    with open(path, "ab") as file:
        file.write(b'torn\n["switch", 3, 4]\n["train", 60')
    spans = lanes.follow()["trainer-agent"]
    assert [STATES[code] for code in spans.state] == ["train", "idle", "train"]
    assert (spans.end - STARTED).tolist() == [4.0, 5.5, 6.0]
    assert len(lanes.follow()["trainer-agent"]) == 3


def test_every_prompt_is_somewhere_and_every_end_has_its_cause(tmp_path: Path) -> None:
    shown = flow(watched(make_run(tmp_path)))
    prompts = shown["prompts"]
    assert prompts["taken"] == prompts["admitted"] + prompts["skipped"]
    assert prompts["admitted"] == sum(end["count"] for end in prompts["ends"])
    assert {"state": "filtered", "cause": "zero_variance", "count": 5} in prompts["ends"]
    assert shown["episodes"]["failures"] == {"timeout": 3}
    assert shown["samples"] == {"produced": 100, "accepted": 88, "entered": 60, "consumed": 60, "stale": 0}


def test_the_mean_of_the_fleet_stands_beside_the_worst_node(tmp_path: Path) -> None:
    shown = nodes(watched(make_run(tmp_path)), None)
    fleet = {one["key"]: one for one in shown["fleet"]}
    assert (fleet["throughput"]["mean"], fleet["throughput"]["worst"], fleet["throughput"]["node"]) == (
        2.25,
        0.5,
        "rollout-1",
    )
    assert fleet["failed_share"]["worst"] == 0.6
    assert [row["name"] for row in shown["nodes"]] == ["rollout-1", "rollout-0"]


def test_a_traceback_stays_with_its_error(tmp_path: Path) -> None:
    run = watched(make_run(tmp_path))
    shown = log_files(run)
    assert [(file["name"], file["errors"], file["warnings"]) for file in shown["files"]] == [("rollout-0", 1, 1)]
    assert shown["user_errors"][0]["count"] == 3
    lines = log_lines(run, "rollout-0", "ERROR")["lines"]
    assert [line for _, line in lines][-1] == "ValueError: bad"
    assert [line for _, line in log_lines(run, "rollout-0", find="THREE")["lines"]] == [
        "2026-01-01 10:00:02,000 WARNING c: three"
    ]


@pytest.mark.parametrize("name", ["../run.json", "a/b", ".lock", ""])
def test_a_log_is_a_name_and_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest):
        log_lines(watched(make_run(tmp_path)), name)


def test_a_damaged_ledger_is_an_error_of_its_panel_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    folder.ledger.write_bytes(b"no database at all" * 100)
    with pytest.raises(CorruptData):
        flow(watched(folder))
    assert overview(watched(folder), None, WIDE)["charts"]


def test_torn_small_files_do_not_hide_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder.root / "state.json").write_text('{"sta')
    assert overview(watched(folder), None, WIDE)["run"]["state"] == "unknown"


def test_runs_are_named_by_their_folders(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert [run.name for run in watch([one.root, other.root])] == [one.root.name, f"{one.root.name}-2"]
    with pytest.raises(ConfigError):
        watch([one.root, one.root])
    with pytest.raises(RunError):
        watch([tmp_path])
