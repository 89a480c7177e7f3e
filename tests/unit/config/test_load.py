"""Recipes: valid ones load, invalid ones are refused with a clear message."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from rillflow.config import Recipe, load_recipe, recipes, resolve_object, write_resolved
from rillflow.config.load import FIT, read_raw, read_resolved, validate
from rillflow.errors import ConfigError

MINIMAL = """
name: mine
policies: {agent: {model: tiny}}
workflow: play.py:play
data: {prompts: {path: prompts.jsonl}}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "play.py").write_text("async def play(episode):\n    return 1.0\n")
    (tmp_path / "prompts.jsonl").write_text('{"q": 1}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def with_lines(path: Path, *lines: str) -> str:
    path.write_text(MINIMAL + "\n".join(lines))
    return str(path)


def test_minimal_recipe_has_defaults_that_work(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file))
    assert recipe.policy == "agent"
    assert recipe.dataflow.group_size == 8


def test_files_are_relative_to_the_recipe(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file))
    assert recipe.workflow == f"{recipe_file.parent / 'play.py'}:play"
    assert recipe.data.prompts[0].path == str(recipe_file.parent / "prompts.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rolout: {nodes: 2}", "did you mean 'rollout'"),
        ("rollout: {node: 2}", "did you mean 'nodes'"),
        ("trainer: {learning_rte: 1}", "unknown key policies.agent.trainer.learning_rte"),
        ("trainer: {clip_hi: 1}", "did you mean 'clip_high'"),
        ("trainr: {lr: 1}", "did you mean 'trainer'"),
        ("seed: many", "seed: Input should be a valid integer"),
        ("rollout: {nodes: 0}", "greater than or equal to 1"),
        ("trainer: {algorithm: gpro}", "'grpo'"),
        ("runtime: {deterministic: true}", "needs dataflow.staleness=0"),
        ("data: {prompts: {}}", "exactly one of `path`"),
        ("data: {prompts: [{path: a}, {pth: b}]}", "unknown key data.prompts.1.pth; did you mean 'path'"),
        ("dataflow: {filters: [{name: x, optons: {}}]}", "dataflow.filters.0.optons; did you mean 'options'"),
        ("dataflow: {filters: [{overlong: 3}]}", "dataflow.filters.0.options"),
        ("trainer: {graph: [{functio: x}]}", "trainer.graph.0.functio; did you mean 'function'"),
        ("trainer: {nodes: [{function: x, idd: y}]}", "trainer.nodes.0.idd; did you mean 'id'"),
        ("runtime: {mode: colocated}\nrollout: {nodes: 2}", "raise trainer.ranks, not rollout.nodes"),
        ("evaluation: {target: 0.9, every: 1}", "evaluation.target needs data.heldout"),
        ("evaluation: {target: .nan}", "evaluation.target: Input should be a finite number"),
        ("gateway: {aliases: {gpt-4o: agnt}}", "gateway.aliases.gpt-4o names 'agnt'; there is agent"),
        ("gateway: {aliases: {agent: agent}}", "gateway.aliases.agent is the name of a policy"),
        ("policies: {a: {model: tiny, trains_on: [b]}}", "policies.a.trains_on names 'b'"),
        ("policies: {a: {model: tiny, trains_on: []}}", "policies.a.trains_on: List should have at least 1 item"),
        ("policies: {a: {model: tiny, trains_on: [a, a]}}", "policies.a.trains_on: it names one twice"),
        ("policies: {a: {model: tiny, stages: {s: {kin: x}}}}", "policies.a.stages.s.kin; did you mean 'kind'"),
    ],
)
def test_mistakes_are_named(recipe_file: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_recipe(with_lines(recipe_file, line))


def test_a_target_needs_evaluations_while_the_run_trains() -> None:
    assert load_recipe("quickstart", ["evaluation.target=0.5", "evaluation.every=3"]).evaluation.target == 0.5
    with pytest.raises(ConfigError, match=r"evaluation\.target needs evaluation\.every above 0"):
        load_recipe("quickstart", ["evaluation.target=0.5", "evaluation.every=0"])


def test_missing_key_is_named(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL.replace("name: mine", ""))
    with pytest.raises(ConfigError, match="name is missing"):
        load_recipe(str(recipe_file))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", "just text"])
def test_files_that_are_no_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_recipe(str(path))


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstar")
    assert "did you mean 'quickstart'" in caught.value.hint


def test_missing_recipe_file() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_recipe("nowhere/none.yaml")


def test_overrides_win(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["trainer.lr=1e-4", "seed=5", "runtime.deterministic=false"])
    assert recipe.policies["agent"].trainer.lr == 1e-4
    assert recipe.seed == 5


def test_a_temperature_that_an_engine_would_round_is_refused(recipe_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature.*must be 0 or at least 0\.01"):
        load_recipe(with_lines(recipe_file, "seed: 1"), ["policies.agent.sampling.temperature=0.005"])


@pytest.mark.parametrize("override", ["seed", "=3", "seed.deeper=3"])
def test_bad_overrides(recipe_file: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load_recipe(with_lines(recipe_file, "seed: 1"), [override])


LISTS = (
    "data: {prompts: [{path: a.jsonl}, {path: b.jsonl}]}",
    "dataflow: {filters: [zero_variance, {play.py:play: {least: 2}}, {name: 'play.py:play'}, {overlong: }]}",
)


def test_hooks_in_every_written_form(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(with_lines(recipe_file, *LISTS))
    own = f"{tmp_path / 'play.py'}:play"
    hooks = [(hook.name, hook.options) for hook in recipe.dataflow.filters]
    assert hooks == [("zero_variance", {}), (own, {"least": 2}), (own, {}), ("overlong", {})]
    write_resolved(recipe, tmp_path / "resolved.yaml")
    assert read_resolved(tmp_path / "resolved.yaml") == recipe


def test_an_override_names_an_item_of_a_list_by_its_number(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As errors name it."""
    monkeypatch.chdir(tmp_path)
    changes = ["data.prompts.1.limit=3", "dataflow.filters.3.overlong.share=0.2", "dataflow.filters.0=play.py:play"]
    recipe = load_recipe(with_lines(recipe_file, *LISTS), changes)
    assert [source.limit for source in recipe.data.prompts] == [None, 3]
    assert recipe.dataflow.filters[3].options == {"share": 0.2}
    assert recipe.dataflow.filters[0].name == f"{tmp_path / 'play.py'}:play"


@pytest.mark.parametrize("override", ["data.prompts.2.limit=3", "data.prompts.limit=3", "data.prompts.-1={path: x}"])
def test_items_that_a_list_does_not_have(recipe_file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an item of a list of 2") as caught:
        load_recipe(with_lines(recipe_file, *LISTS), [override])
    assert "data.prompts.0" in caught.value.hint


@pytest.mark.parametrize("prompts", ["{path: c.jsonl}", "[{path: c.jsonl}]"])
def test_a_recipe_replaces_the_sources_of_one_that_it_extends(recipe_file: Path, tmp_path: Path, prompts: str) -> None:
    with_lines(recipe_file, *LISTS)
    (tmp_path / "child.yaml").write_text(f"extends: mine.yaml\ndata: {{prompts: {prompts}}}\n")
    (source,) = load_recipe(str(tmp_path / "child.yaml")).data.prompts
    assert source.path == str(tmp_path / "c.jsonl")


def test_policy_trainer_wins_over_the_shared_one(recipe_file: Path) -> None:
    text = MINIMAL.replace("{model: tiny}", "{model: tiny, trainer: {lr: 0.5}}") + "trainer: {lr: 0.1, steps: 3}\n"
    recipe_file.write_text(text)
    trainer = load_recipe(str(recipe_file)).policies["agent"].trainer
    assert (trainer.lr, trainer.steps) == (0.5, 3)


def test_extends_composes(recipe_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: mine.yaml\nname: child\nseed: 9\ndata: {epochs: 2}\n")
    recipe = load_recipe(str(child))
    assert (recipe.name, recipe.seed, recipe.data.epochs) == ("child", 9, 2)
    assert recipe.data.prompts[0].path is not None


def test_extends_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_recipe(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("name", [name for name in recipes() if FIT not in read_raw(name)])
def test_shipped_recipes_load_and_survive_being_written(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.description
    write_resolved(recipe, tmp_path / "recipe.yaml")
    assert validate(yaml.safe_load((tmp_path / "recipe.yaml").read_text())) == recipe
    assert isinstance(recipe, Recipe)


def test_resolve_object(recipe_file: Path) -> None:
    assert resolve_object("rillflow.config:Recipe") is Recipe
    assert resolve_object(f"{recipe_file.parent / 'play.py'}:play").__name__ == "play"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nocolon", "must look like"),
        ("no.such.module:x", "cannot import"),
        ("rillflow.config:Recipee", "has no 'Recipee'"),
        ("/nowhere/play.py:play", "does not exist"),
    ],
)
def test_references_that_lead_nowhere(reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_object(reference)


def test_a_file_imports_its_neighbours_and_hides_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("rewards_at_load", "rewards_later", "this"):  # `this` is a module of Python, too
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text("value = 1\n")
    (tmp_path / "play.py").write_text(
        "import rewards_at_load\ndef reward():\n    import rewards_later\n    return rewards_later.value\n"
    )
    for _ in range(2):
        assert resolve_object(f"{tmp_path / 'play.py'}:reward")() == 1
    assert sys.path.count(str(tmp_path)) == 1
    found = importlib.util.find_spec("this")
    assert found is not None
    assert Path(str(found.origin)).parent != tmp_path


def test_a_file_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve_object(f"{tmp_path / 'broken.py'}:x")


# ---------------------------------------------------------------- what people get wrong


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trainer: 5", "trainer must be a section"),
        ("trainer: {lr: .inf}", "finite number"),
        ("rollout: {episode_timeout: .inf}", "finite number"),
        ("trainer: {betas: [0.9, 1.5]}", "less than 1"),
        ("seed: 99999999999999999999", "less than"),
    ],
)
def test_values_that_no_run_could_use_are_refused(recipe_file: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(with_lines(recipe_file, line))


def test_a_policy_trainer_that_is_no_section_is_named(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL.replace("{model: tiny}", "{model: tiny, trainer: 3}") + "trainer: {lr: 0.1}\n")
    with pytest.raises(ConfigError, match=r"policies\.agent\.trainer"):
        load_recipe(str(recipe_file))


@pytest.mark.parametrize("name", ["../outside", "a/b", "", "-x"])
def test_policy_names_are_names_of_folders(recipe_file: Path, name: str) -> None:
    recipe_file.write_text(MINIMAL.replace("agent:", f"{name!r}:"))
    with pytest.raises(ConfigError, match="policies"):
        load_recipe(str(recipe_file))


def test_a_file_that_is_no_text_is_named(recipe_file: Path) -> None:
    recipe_file.write_bytes(MINIMAL.encode() + b"description: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load_recipe(str(recipe_file))


def test_an_override_reaches_into_an_empty_section(recipe_file: Path) -> None:
    assert load_recipe(with_lines(recipe_file, "trainer:"), ["trainer.lr=0.5"]).policies["agent"].trainer.lr == 0.5


def test_files_in_overrides_are_relative_to_where_the_user_is(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text("async def play(episode): ...\n")
    monkeypatch.chdir(here)
    recipe = load_recipe(str(recipe_file), ["data.prompts.path=rows.jsonl", "workflow=mine.py:play"])
    assert recipe.data.prompts[0].path == str(here / "rows.jsonl")
    assert recipe.workflow == f"{here / 'mine.py'}:play"
    sections = load_recipe(str(recipe_file), ["data={prompts: {path: rows.jsonl}}"])
    assert sections.data.prompts[0].path == str(here / "rows.jsonl")


def test_a_folder_beside_the_recipe_is_not_taken_for_a_module_or_for_the_shipped_policy(
    recipe_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "tiny").mkdir()
    recipe_file.write_text(MINIMAL.replace("play.py:play", "agents:play"))
    recipe = load_recipe(str(recipe_file))
    assert recipe.workflow == "agents:play"
    assert recipe.policies["agent"].model == "tiny"


def test_arguments_of_a_generator_are_handed_over_as_they_are(recipe_file: Path) -> None:
    prompts = "{generator: 'play.py:prompts', arguments: {path: 's3://bucket/rows'}}"
    recipe_file.write_text(MINIMAL.replace("{path: prompts.jsonl}", prompts))
    assert load_recipe(str(recipe_file)).data.prompts[0].arguments == {"path": "s3://bucket/rows"}


def test_home_is_understood(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe_file.write_text(MINIMAL.replace("prompts.jsonl", "~/rows.jsonl"))
    assert load_recipe(str(recipe_file)).data.prompts[0].path == str(tmp_path / "home" / "rows.jsonl")
