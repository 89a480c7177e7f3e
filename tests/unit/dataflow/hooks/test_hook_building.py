from __future__ import annotations

import textwrap

import pytest
import yaml
from hook_groups import Played, Waiting, prompt

from rillflow.config import DataflowConfig, load_recipe
from rillflow.dataflow.hooks import CURATORS, FILTERS, SAMPLERS
from rillflow.dataflow.hooks.running import Hooks
from rillflow.errors import ConfigError


def hooks_of(**dataflow):
    return Hooks.of(DataflowConfig.model_validate(dataflow))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("dataflow", "message", "hint"),
    [
        ({"curators": ["gresso"]}, "there is no curator 'gresso'", "did you mean 'greso'?"),
        ({"filters": ["nonsense"]}, "there is no filter 'nonsense'", "known: length_band"),
        ({"sampler": "fifi"}, "there is no sampler 'fifi'", "did you mean 'fifo'?"),
        ({"curators": [{"greso": {"flor_easy": 0}}]}, "greso has no option 'flor_easy'", "did you mean 'floor_easy'?"),
        ({"filters": [{"zero_variance": {"std": 1}}]}, "zero_variance has no option 'std'", "valid: least"),
        ({"filters": ["staleness"]}, "staleness needs the option 'most'", "write {staleness: {most: …}}"),
        (
            {"curators": [{"greso": {"floor_easy": 2}}]},
            "option floor_easy: it should be less than or equal to 1",
            "fix",
        ),
        ({"curators": [{"greso": {"step": "nan"}}]}, "option step: it should be a finite number", "fix"),
        ({"curators": [{"solved": {"times": 0}}]}, "option times: it should be greater than or equal to 1", "fix"),
        ({"curators": [{"mixing": {"weights": {"a": 0}}}]}, "option weights.a: it should be greater than 0", "fix"),
        ({"curators": [{"mixing": {"weights": {}}}]}, "option weights", "fix"),
        ({"sampler": {"replay": {"ratio": 0.5, "choose": "best"}}}, "'latest', 'random' or 'prioritised'", "fix"),
        ({"sampler": {"replay": {"ratio": 1, "fresh": "fifi"}}}, "there is no sampler 'fifi'", "did you mean 'fifo'?"),
        ({"sampler": {"replay": {"ratio": 1, "fresh": {"replay": {"ratio": 1}}}}}, "does not replay itself", "fix"),
        ({"filters": [{"length_band": {"shortest": 5, "longest": 3}}]}, "longest (3) must be at least shortest", "fix"),
        ({"curators": [{"curriculum": {"start": 2, "end": 1, "versions": 1}}]}, "end must be at least start", "fix"),
        ({"filters": [{"expression": {"keep": "mean(rewards) < 1"}}]}, "`expression` was removed", "def keep(group)"),
        ({"filters": ["json:scanner"]}, "json:scanner is no class but <module", "name a class with keep as filter"),
        ({"sampler": "json:dumps"}, "json:dumps is no class but <function", "name a class with pick as sampler"),
        ({"filters": ["rillflow.storage.files:disk_erors"]}, "has no 'disk_erors'", "did you mean 'disk_errors'?"),
        ({"filters": ["asyncio:sleep"]}, "asyncio:sleep is a coroutine function", "returns True, False or the reason"),
        ({"filters": ["os:getcwdu"]}, "os has no 'getcwdu'", "did you mean 'getcwd'?"),
        ({"filters": ["asyncio:get_event_loop_policy"]}, "takes no argument", "def keep(group)"),
        ({"filters": [{"shutil:which": {"pth": 1}}]}, "which has no option 'pth'", "did you mean 'path'?"),
        ({"filters": ["shutil:copyfile"]}, "filter shutil:copyfile needs the option 'dst'", "write {shutil:copyfile:"),
        ({"filters": ["json:JSONEncoder"]}, "cannot be a filter: it has no keep", "docs/data_algorithms.md"),
        ({"curators": ["rillflow.dataflow.hooks.samplers:Fifo"]}, "it has no admit, observe", "a curator has"),
        ({"sampler": "no.such.module:Class"}, "cannot import no.such.module", "install it"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(dataflow, message, hint):
    with pytest.raises(ConfigError) as caught:
        hooks_of(**dataflow)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_hook_whose_constructor_raises_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n    def __init__(self):\n        {}['x']\n    keep = None.__eq__\n")
    with pytest.raises(ConfigError, match=r"filter mine\.py:Mine could not be made: KeyError: 'x'"):
        hooks_of(filters=[f"{tmp_path}/mine.py:Mine"])


def test_all_registered_hooks_can_be_made():
    needed = {
        "curriculum": {"start": 0, "end": 1, "versions": 9},
        "mixing": {"weights": {"a": 1}},
        "staleness": {"most": 1},
        "replay": {"ratio": 0.5},
    }
    for name in SAMPLERS:
        hooks_of(sampler={name: needed.get(name)})
    hooks = hooks_of(
        curators=[{name: needed.get(name)} for name in CURATORS], filters=[{name: needed.get(name)} for name in FILTERS]
    )
    assert [name for name, _ in hooks.curators] == list(CURATORS)
    assert [name for name, _ in hooks.filters] == list(FILTERS)


def test_numbers_may_be_written_as_text():
    hooks_of(curators=[{"greso": {"step": "1e-4"}}])


# ---------------------------------------------------------------- a recipe with several

RECIPE = """
    name: several
    policies: {agent: {model: tiny}}
    workflow: rillflow.examples.stockroom:play
    data: {prompts: {path: prompts.jsonl}}
    dataflow:
      curators:
        - only.py:Source: {name: math}
        - solved: {times: 1, rest: 1}
        - curriculum: {start: 1, end: 1, versions: 1, key: level}
      filters:
        - zero_variance
        - overlong: {share: 0.25}
        - only.py:below: {most: 0.9}
        - only.py:Odd
      sampler:
        replay: {ratio: 0.5, fresh: fifo}
"""
OWN = """
    class Source:
        def __init__(self, *, name):
            self.name, self.asked = name, []
        def admit(self, prompt):
            self.asked.append(prompt.id)
            return prompt.source == self.name
        def observe(self, group): pass
        def on_version(self, version): pass
        def state(self): return {"asked": self.asked}
        def restore(self, state): self.asked = state["asked"]

    class Odd:
        def keep(self, group):
            return len(group.rewards) % 2 == 1

    def below(group, most):
        return sum(group.rewards) / len(group.rewards) < most or "too_easy"

    def leveled(group):
        return group.prompt.payload["level"] > 1
"""


@pytest.fixture
def hooks(tmp_path):
    (tmp_path / "only.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "recipe.yaml").write_text(textwrap.dedent(RECIPE))
    return Hooks.of(load_recipe(str(tmp_path / "recipe.yaml")).dataflow)


def test_curators_of_a_recipe_are_asked_in_order_until_one_refuses(hooks):
    def ask(name, source="math", level=1):
        return hooks.admits(prompt(name, source, level=level), 0)

    assert (ask("a"), ask("b", source="code"), ask("c", level=2)) == (True, False, False)
    hooks.observe(Played(prompt("a", "math"), [1.0, 1.0]))
    assert not ask("a", source="code")  # refused before `solved` could count the visit
    assert [ask("a"), ask("a")] == [False, True]
    assert hooks.curators[0][1].asked == ["a", "b", "c", "a", "a", "a"]


@pytest.mark.parametrize(
    ("rewards", "cut", "verdict"),
    [
        ([1.0, 1.0, 1.0], 3, ("filtered", "zero_variance")),
        ([0.0, 1.0, 1.0], 1, ("filtered", "overlong")),
        ([0.8, 1.0, 1.0], 0, ("filtered", "too_easy")),
        ([0.0, 1.0], 0, ("filtered", "only.py:Odd")),
        ([0.0, 1.0, 0.0], 0, ("ready", "")),
    ],
)
def test_the_first_filter_of_a_recipe_that_drops_a_group_gives_the_reason(hooks, rewards, cut, verdict):
    truncated = [place < cut for place in range(len(rewards))]
    assert hooks.verdict(Played(prompt("a"), rewards, truncated=truncated)) == verdict


def test_a_function_is_a_filter(tmp_path):
    (tmp_path / "only.py").write_text(textwrap.dedent(OWN))
    hooks = hooks_of(filters=[f"{tmp_path}/only.py:leveled", {f"{tmp_path}/only.py:below": {"most": 0.5}}])
    assert hooks.verdict(Played(prompt("a", level=2), [0.0])) == ("ready", "")
    assert hooks.verdict(Played(prompt("a", level=1), [0.0])) == ("filtered", "only.py:leveled")
    assert hooks.verdict(Played(prompt("a", level=2), [0.5])) == ("filtered", "too_easy")


def test_a_filter_that_raises_fails_the_group(tmp_path):
    (tmp_path / "only.py").write_text(textwrap.dedent(OWN))
    hooks = hooks_of(filters=[f"{tmp_path}/only.py:leveled"])
    assert hooks.verdict(Played(prompt("a"), [1.0])) == ("failed", "filter only.py:leveled raised KeyError")


def test_a_function_runs_beside_the_service_like_any_hook_of_a_user(tmp_path):
    (tmp_path / "only.py").write_text(textwrap.dedent(OWN))
    assert hooks_of(filters=[f"{tmp_path}/only.py:leveled"]).run_beside(60.0) is not None
    assert hooks_of(filters=["zero_variance"]).run_beside(60.0) is None


def test_the_sampler_of_a_recipe_has_its_own_inner_one(hooks):
    ready = [Waiting("late", order=2, staleness=5), Waiting("early", order=1)]
    assert hooks.pick(ready, 1) == ["early"]
    assert hooks.replay(ready, 2) == ["early"]


def test_hooks_survive_the_resolved_recipe(tmp_path, hooks):
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    again = DataflowConfig.model_validate(yaml.safe_load(yaml.safe_dump(recipe.dataflow.model_dump(mode="json"))))
    assert [name for name, _ in Hooks.of(again).filters] == [name for name, _ in hooks.filters]


def test_module_class_with_options():
    hooks = hooks_of(filters=[{"rillflow.dataflow.hooks.filters:Staleness": {"most": 1}}])
    assert hooks.verdict(Played(prompt("a"), [1.0], staleness=2)) == ("filtered", "stale")
