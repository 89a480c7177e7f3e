"""Weights, balance, data algorithms, and two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from dashboard_run import STARTED, make_run, step_line, write_lines

from rillflow.config.secrets import MASK
from rillflow.dashboard.views.charts import Window
from rillflow.dashboard.views.flow import algorithms
from rillflow.dashboard.views.nodes import balance, weights
from rillflow.dashboard.views.overview import compare, differences
from rillflow.dashboard.watched import WatchedRun
from rillflow.runtime.folder import RunFolder

WIDE = Window(width=400)


def watched(folder: RunFolder) -> WatchedRun:
    return WatchedRun(folder, folder.root.name, clock=lambda: STARTED + 100.0)


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
