"""Drawings of chains, and the graphs page of the docs."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from graph_helpers import stub, stubs

from rillflow.config import TrainerConfig, load_recipe
from rillflow.trainer.batches import FETCHED
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.graph.drawing import HEADER, svg, table, text
from rillflow.trainer.graph.nodes import REGISTRY, Node
from rillflow.trainer.graph.planner import Chain, plan

SVG = "{http://www.w3.org/2000/svg}"
SETTINGS: list[dict[str, Any]] = [
    {},
    {"overlong": {"longest": 100, "margin": 10}, "kl": {"where": "loss"}},
    {"algorithm": "ppo", "kl": {"where": "reward"}, "truncate": 2.0, "overlong": {"longest": 100, "margin": 10}},
]


def chains() -> list[Chain]:
    return [chain_of(TrainerConfig(**settings)) for settings in SETTINGS]


def boxes(drawn: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of each node's."""
    found = []
    for rect in ElementTree.fromstring(drawn).iter(f"{SVG}rect"):
        if rect.get("stroke"):
            x, y, width, height = (float(str(rect.get(name))) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("chain", chains(), ids=["grpo", "grpo with kl", "ppo"])
def test_all_nodes_and_columns_are_drawn(chain: Chain) -> None:
    drawn = svg(chain)
    words = [each.text for each in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    for node in chain.nodes:
        assert node.id in words
        for column in node.gives if node.on_columns else ():
            assert column in words
    assert [str(number) for number in range(1, len(chain.nodes) + 1)] == [w for w in words if w and w.isdecimal()]


@pytest.mark.parametrize("chain", chains(), ids=["grpo", "grpo with kl", "ppo"])
def test_boxes_do_not_overlap_and_arrows_pass_between_them(chain: Chain) -> None:
    drawn = svg(chain)
    places = boxes(drawn)
    assert len(places) == len(chain.nodes)
    for one, other in combinations(places, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    for path in ElementTree.fromstring(drawn).iter(f"{SVG}path"):
        if not (path.get("class") or "").startswith("arrow"):
            continue
        numbers = [float(number) for number in re.findall(r"[\d.]+", str(path.get("d")))]
        for x, y in zip(numbers[::2], numbers[1::2], strict=True):
            assert not any(left < x < right and top < y < bottom for left, top, right, bottom in places)


def test_names_are_never_markup() -> None:
    odd = Node("<b>&", stub("odd", "reward", "compute", "", "x_N"), ranks=2)
    chain = plan(["fetch", "advantages", "train_actor", "publish", odd], stubs(), ranks=2)
    words = [each.text for each in ElementTree.fromstring(svg(chain)).iter(f"{SVG}text")]
    assert "<b>&" in words
    assert "reward · compute · 2 ranks" in words
    assert "x_N" in words  # no node reads it: it is for the loss


def test_the_same_chain_is_drawn_the_same() -> None:
    assert svg(chains()[2]) == svg(chains()[2])


def test_the_table_has_a_row_for_each_node() -> None:
    chain = chain_of(TrainerConfig(algorithm="ppo", kl={"where": "reward"}))
    rows = table(chain)
    assert [row[0] for row in rows] == [node.id for node in chain.nodes]
    gae = dict(zip(HEADER, rows[4], strict=True))
    assert gae["node"] == "gae"
    assert {"value_N", "kl_N"} <= set(gae["reads"].split(", "))
    assert gae["makes"] == "advantage_N, return_N"
    assert gae["per"] == "batch"
    without = dict(zip(HEADER, table(chain_of(TrainerConfig(algorithm="ppo")))[2], strict=True))
    assert "kl_N" not in without["reads"]  # an optional column that no node makes is not read


def test_text_is_aligned() -> None:
    lines = text(chains()[0]).splitlines()
    assert lines[0].split() == list(HEADER)
    assert {line.index(" actor ") for line in lines[1:]} == {lines[0].index("role") - 1}
    assert all(not line.endswith(" ") for line in lines)


DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGE = (DOCS / "graphs.md").read_text()
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
SECTIONS = [yaml.safe_load(text)["trainer"] for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_drawing_is_of_the_command_above_it() -> None:
    """After a change that is meant, run the command with --svg docs/images/step-ppo.svg."""
    (overrides,) = re.findall(r"\$ rillflow graph quickstart (.*) --svg", PAGE)
    recipe = load_recipe("quickstart", overrides.split())
    assert (DOCS / "images" / "step-ppo.svg").read_text() == svg(chain_of(recipe.policies["agent"].trainer))


def test_the_example_can_be_planned(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    recipe = load_recipe(str(tmp_path / "short.yaml"))
    assert [node.id for node in chain_of(recipe.policies["agent"].trainer).nodes] == [
        "fetch", "shorter", "group_statistics", "advantages", "train_actor", "publish",
    ]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: next(iter(section)))
def test_other_examples_can_be_planned(section: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FILES["rewards.py"])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"extends": "quickstart", "trainer": section}))
    trainer = load_recipe(str(tmp_path / "mine.yaml")).policies["agent"].trainer
    assert len(chain_of(trainer).nodes) == (7 if trainer.nodes else 5)


def test_the_table_has_every_function_and_the_text_every_column_of_rows() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    listed = {name: (what, makes) for names, what, _, makes in rows for name in re.findall(r"`(\w+)`", names)}
    own = [name for name in REGISTRY.names if _module(name).startswith("rillflow.trainer.graph.")]
    assert sorted(listed) == own
    for name, (what, makes) in listed.items():
        found = REGISTRY.named(name)
        assert found is not None
        assert what.split()[0] == found.role
        assert set(re.findall(r"`(\w+_[RN])`", makes)) == set(found.gives)
    for column in FETCHED:
        assert f"`{column}`" in PAGE


def _module(name: str) -> str:
    found = REGISTRY.named(name)
    assert found is not None
    return str(found.run.__module__)
