"""The content of the dashboard's panels."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from dashboard_run import STARTED, make_run, step_line, write_lines, write_spans

from rillflow.config.secrets import MASK
from rillflow.config.supervised import load_fit
from rillflow.dashboard.charts import Window, compare, differences, metrics, overview
from rillflow.dashboard.flow import algorithms, flow
from rillflow.dashboard.nodes import balance, nodes, weights
from rillflow.dashboard.readers import Lanes, Spans
from rillflow.dashboard.records import bars, log_files, log_lines, shares, timeline
from rillflow.dashboard.watched import WatchedRun, watch
from rillflow.dataflow.ledger.database import Database
from rillflow.errors import BadRequest, ConfigError, CorruptData, RunError
from rillflow.runtime.folder import RunFolder
from rillflow.storage.spans import STATES, Span
from rillflow.types.runs import folder_of

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


def test_versions_with_their_sizes_and_transfers(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    store = folder.weights("agent")
    store.mkdir(parents=True)
    assert weights(watched(folder), None)["policies"][0]["head"] is None
    entries = {"0": {"full_bytes": 1000}, "1": {"delta_of": 0, "delta_bytes": 20}}
    (store / "head.json").write_text(json.dumps({"head": 1, "orphaned": [7], "entries": entries, "signature": ""}))
    shown = weights(watched(folder), None)
    [policy] = shown["policies"]
    assert (policy["head"], policy["orphaned"]) == (1, 1)
    assert [(one["version"], one["delta_bytes"], one["delta_of"]) for one in policy["versions"]] == [
        (1, 20, 0),
        (0, 0, None),
    ]
    assert policy["versions"][0]["probe"] is None  # its manifest is not there
    assert [(row["node"], row["loads"], row["pull_bytes"]) for row in shown["transfers"]] == [
        ("rollout-0", 3.0, 5e6),
        ("rollout-1", 3.0, 5e6),
    ]


def test_a_torn_line_of_versions_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    store = folder.weights("agent")
    store.mkdir(parents=True)
    (store / "head.json").write_text('{"hea')
    assert "head.json" in weights(watched(folder), None)["policies"][0]["unknown"]


def test_balance_reports_and_decisions(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    report = {
        "event": "balance", "version": 10, "window": {"wait_fraction": 0.4}, "decision": {"target": 2},
        "production": {"gpus": 1, "throughput_per_gpu": 3.0, "produce_consume_ratio": None},
    }  # fmt: skip
    write_lines(folder, [report, {**report, "version": 20}])
    lines = [{"number": n, "time": 1.0, "action": "hold", "why": "so", "size": 1, "wanted": 1} for n in range(3)]
    (folder.root / "maintainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"numb')
    shown = balance(watched(folder), None)
    assert shown["balance"]["current"]["decision"]["branch"] == "hold"
    assert {picture.key for picture in shown["charts"]} == {"wait", "size", "made"}
    assert shown["charts"][0].lines[0].points == [(10.0, 0.4), (20.0, 0.4)]
    assert [line["number"] for line in shown["decisions"]] == [2, 1, 0]


def test_data_algorithms_of_the_recipe_and_what_they_dropped(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_lines(folder, [step_line(6, zero_variance_fraction=0.5)])
    shown = algorithms(watched(folder), WIDE)
    assert [one["name"] for one in shown["filters"]] == ["zero_variance"]
    assert shown["sampler"] == {"name": "earliest_deadline", "options": {}}
    assert shown["skipped"] == 2
    assert shown["trainers"][0]["algorithm"] == "grpo"
    assert [picture.key for picture in shown["charts"]] == ["flat"]


def test_panels_add_up_all_ledgers(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with closing(Database(folder.ledger)) as db:
        db.run("INSERT INTO share_tally VALUES ('agent', 'filtered', 'zero_variance', 5)")
        db.run("INSERT INTO hook_state VALUES ('filters.0', 'seen', '7')")
        db.commit()
    other = folder_of(folder.root, 1)
    other.mkdir(parents=True)
    shutil.copy(folder.ledger, other / folder.ledger.name)
    known = json.loads((folder.root / "run.json").read_text())
    (folder.root / "run.json").write_text(json.dumps({**known, "ledgers": 2}))
    run = watched(RunFolder.open(folder.root))
    shown = algorithms(run, WIDE)
    assert (shown["taken"], shown["skipped"], shown["groups"]) == (40, 4, 34)
    assert shown["filtered"] == [{"policy": "agent", "cause": "zero_variance", "count": 10}]
    assert [state["key"] for state in shown["states"]] == ["ledger 0: seen", "ledger 1: seen"]
    assert [error["count"] for error in log_files(run)["user_errors"]] == [6]
    assert {row["name"]: row["completed"] for row in nodes(run, None)["nodes"]} == {"rollout-0": 80, "rollout-1": 8}


def test_two_runs_share_their_charts(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=3)
    recipe = yaml.safe_load((other.root / "recipe.yaml").read_text())
    recipe["seed"] = 99
    (other.root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shown = compare(watched(one), watched(other), WIDE)
    loss = next(chart for chart in shown["charts"] if chart.key == "loss")
    assert [(line.name, len(line.points)) for line in loss.lines] == [("A agent", 5), ("B agent", 3)]
    step = next(row for row in shown["figures"] if row["name"] == "step")
    assert (step["left"], step["right"]) == (5.0, 3.0)
    assert [(row["path"], row["right"]) for row in shown["recipe"]["rows"]] == [("seed", "99")]


def test_secrets_of_recipes_are_not_shown(tmp_path: Path) -> None:
    """A reader's token opens the dashboard; the recipe is for its owner."""
    one, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    recipe = yaml.safe_load((other.root / "recipe.yaml").read_text())
    recipe["dataflow"]["units"]["redis"] = "redis://me:hidden@host:6379/0"
    recipe["tools"] = [{"mcp": {"headers": {"Authorization": "hidden"}}}]
    (other.root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rows = {row["path"]: row["right"] for row in compare(watched(one), watched(other), WIDE)["recipe"]["rows"]}
    assert rows["dataflow.units.redis"] == "redis://host:6379/0"
    assert rows["tools[0].mcp.headers.Authorization"] == MASK


def test_what_is_not_set_counts_as_null() -> None:
    found = differences({"a": None, "b": [1, 2], "c": {"d": "x"}}, {"b": [1, 3], "c": {}})
    assert [(row["path"], row["left"], row["right"]) for row in found["rows"]] == [
        ("b[1]", "2", "3"),
        ("c.d", "x", None),
        ("c", None, "{}"),
    ]
