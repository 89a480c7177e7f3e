"""Every command and snippet of the documentation is checked against the code.

Commands are parsed: names, options and the number of arguments must be valid. Those in `CHEAP` are also run. Recipes
are validated against the schema. Python is compiled, and what it imports of Rillflow is imported; `test_docs_python`
executes it, or names the test that does.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from docs_blocks import PAGES, READING, ROOT, blocks, command_lines
from rillflow.cli.main import app
from rillflow.config import load_recipe, recipes
from rillflow.config.load import read_raw, validate
from rillflow.config.supervised import FitRecipe, load_fit

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
# They need neither a run nor a model, and end within a second.
CHEAP = ("environments", "grafana", "leakage train.jsonl test.jsonl", "recipes", "recipes quickstart", "rewards")

# The documented commands that take longer, and the test that executes each.
EXECUTED = {
    "dashboard": "integration/test_dashboard_browser.py::test_two_runs_side_by_side",
    "environments": "unit/agents/environments/test_openenv.py::test_an_episode_over_the_wire_is_the_episode_here",
    "eval": "integration/test_evaluation_lane.py::test_an_evaluation_that_is_stopped_leaves_its_records_and_goes_on",
    "export": "unit/cli/test_export.py::test_transformers_loads_what_was_published",
    "fit": "integration/test_fit_recipes.py::test_two_ranks_have_the_curve_of_one",
    "graph": "unit/cli/test_graph_command.py::test_the_drawing",
    "label": "integration/test_agentflow_run.py::test_from_continuations_to_labels_to_step_rewards",
    "maintain": "integration/test_maintainer_run.py::test_a_node_is_started_and_stopped_by_reports",
    "nodes": "integration/test_elastic_run.py::test_nodes_come_and_go_while_the_trainer_trains",
    "play": "unit/cli/test_agents_commands.py::test_the_gold_player_wins",
    "relay": "integration/test_weight_commands.py::test_from_the_run_through_a_relay",
    "retire": "integration/test_elastic_run.py::test_nodes_come_and_go_while_the_trainer_trains",
    "rollout": "integration/test_elastic_run.py::test_nodes_come_and_go_while_the_trainer_trains",
    "run": "integration/test_run.py::test_a_short_run_leaves_what_it_promises",
    "stage": "integration/test_joined_parts.py::test_a_whole_run_of_joined_parts",
    "tags": "integration/test_tags_run.py::test_tags_change_while_the_run_trains",
    "tools": "unit/agents/tools/test_mcp_server.py::test_the_command_serves_pipes",
    "trainer": "integration/test_joined_parts.py::test_a_whole_run_of_joined_parts",
    "try": "unit/cli/test_try_command.py::test_an_endpoint_answers_in_place_of_the_policy",
    "unit": "integration/test_joined_parts.py::test_a_whole_run_of_joined_parts",
    "warm": "unit/runtime/test_warm.py::test_a_command_runs_in_a_fork_with_the_streams_of_its_caller",
}


@pytest.mark.parametrize("line", command_lines())
def test_a_command_can_be_parsed(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "bash":
        assert (ROOT / words[0]).is_file()
    elif program == "python":
        check_module(words[1], [word for word in words[2:] if word.startswith("--")])
    else:
        parse(words[0], words[1:])


def test_every_documented_command_is_executed() -> None:
    lines = [shlex.split(line.values[0]) for line in command_lines()]
    named = {words[1] for words in lines if words[0] == "rillflow"}
    assert named - {line.split()[0] for line in CHEAP} - READING - set(EXECUTED) == set()
    for command, test in EXECUTED.items():
        path, _, name = test.partition("::")
        text = (ROOT / "tests" / path).read_text()
        assert f"def {name}(" in text, test
        assert command in text, test


def check_module(name: str, options: list[str]) -> None:
    path = ROOT / name.replace(".", "/")
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
    known = source.read_text() + (ROOT / "bench" / "common.py").read_text()
    assert [option for option in options if f'"{option}"' not in known] == []


def parse(name: str, words: list[str]) -> None:
    """Parse a command line as the command would, without converting values: files in examples do not exist."""
    command = COMMANDS[name]
    context = command.make_context(name, [], resilient_parsing=True)
    context.resilient_parsing = False
    _, left, _ = command.make_parser(context).parse_args(words)
    assert left == []


def recipe_lines() -> Iterator[Any]:
    """Yield the documented starts of shipped recipes: name and overrides."""
    for line in command_lines():
        _, name, *words = shlex.split(line.values[0].replace("…", "1"))
        if name in {"fit", "run", "try"} and words and words[0] in recipes():
            yield pytest.param(name, words[0], [word for word in words[1:] if "=" in word], id=line.id)


@pytest.mark.parametrize(("command", "recipe", "overrides"), recipe_lines())
def test_the_recipe_of_a_command_loads(command: str, recipe: str, overrides: list[str]) -> None:
    assert (load_fit if command == "fit" else load_recipe)(recipe, overrides).name


@pytest.mark.parametrize("line", CHEAP)
def test_a_cheap_command_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text(f'{{"question": "What does the {name} file ask?"}}\n')
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("snippet", blocks("yaml"))
def test_a_recipe_snippet_is_valid(snippet: str) -> None:
    """Each alternative of a key that is written several times is checked separately."""
    for text in alternatives(snippet.replace("…", "tiny")):
        change = yaml.safe_load(text)
        if "engine" in change:  # a part of a policy
            change = {"policies": {"agent": change}}
        if "task" in change:
            FitRecipe.model_validate(change)
            continue
        raw = read_raw("stockroom")
        if any(key in change for key in ("workflow", "command")):
            raw.pop("workflow")
        if "policies" in change:  # in an example, policies without a model have it elsewhere
            for policy in change["policies"].values():
                policy.setdefault("model", "tiny")
        elif "roles" in change:
            change["policies"] = {name: {"model": "tiny"} for name in change["roles"].values()}
        change.pop("extends", None)
        validate(raw | change)


def alternatives(snippet: str) -> list[str]:
    """Split a snippet that gives one top-level key several times into one text for each."""
    parts = re.split(r"^(?=\w)", snippet, flags=re.MULTILINE)
    keys = [part.split(":")[0] for part in parts]
    if len(set(keys)) == len(keys):
        return [snippet]
    return [part for part in parts if part.strip()]


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_snippet_can_be_imported(code: str) -> None:
    tree = compile(code.replace("[…]", "[]"), "snippet", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rillflow"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name) or importlib.util.find_spec(f"{node.module}.{name.name}")


def named_files() -> Iterator[Any]:
    for page in PAGES:
        if page.name != "CHANGELOG.md":  # it names files of earlier days
            for name in re.findall(r"`((?:src|tests|bench|recipes|scripts|docs)/[\w/.-]+)`", page.read_text()):
                yield pytest.param(name, id=f"{page.relative_to(ROOT)} {name}")


@pytest.mark.parametrize("name", {one.values[0]: one for one in named_files()}.values())
def test_a_named_file_exists(name: str) -> None:
    assert name == "bench/NAME.py" or (ROOT / name).exists()
