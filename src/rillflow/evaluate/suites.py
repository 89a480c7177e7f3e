"""The suites of an evaluation: benchmarks by name, or the held-out prompts of a run; and the recipe that plays each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.config import PolicyConfig, Recipe, RewardConfig, SourceConfig
from rillflow.contracts import PromptSource
from rillflow.dataflow.sources import open_source, source_names
from rillflow.dataflow.sources.benchmarks import benchmark
from rillflow.errors import ConfigError
from rillflow.evaluate.scores import Kind
from rillflow.gateway.trees.render import Renderer, load_renderer
from rillflow.weights.model_folder import model_folder

HELDOUT = "heldout"
GRADING = "rillflow.evaluate.scores:reward"
_MARGIN = 128  # tokens that a chat template writes around a question
_SHORTEST = 256


@dataclass(frozen=True)
class Suite:
    """The questions of one benchmark, and the recipe by which they are played."""

    name: str
    source: PromptSource
    recipe: Recipe
    kind: Kind


def open_suites(recipe: Recipe, names: Sequence[str], *, limit: int | None, max_tokens: int | None) -> list[Suite]:
    """`names` are benchmarks, or `heldout` for what the recipe holds out, each source for itself. The answers to a
    benchmark are graded by its own reward, unless the workflow rewards itself: then that is the trajectory's. Without
    `max_tokens` an answer is as long as the benchmark says, or, of what is held out, as the recipe does."""
    suites: list[Suite] = []
    for name in names:
        if name == HELDOUT:
            suites += _heldout(recipe, limit, max_tokens)
        else:
            suites.append(_benchmark(recipe, name, limit, max_tokens))
    if len({suite.name for suite in suites}) < len(suites):
        raise ConfigError("a benchmark is named twice", "name each once in --on")
    return suites


def _heldout(recipe: Recipe, limit: int | None, max_tokens: int | None) -> list[Suite]:
    configs = recipe.data.heldout
    if not configs:
        raise ConfigError("the run holds no prompts out", "name benchmarks: --on gsm8k,math500")
    recipe = recipe if max_tokens is None else _answering(recipe, max_tokens)
    suites: list[Suite] = []
    for name, config in zip(source_names(configs), configs, strict=True):
        cut = config.model_copy(update={"limit": _least(config.limit, limit)})
        kind: Kind = "text" if config.benchmark is None else benchmark(config.benchmark).kind
        suites.append(Suite(name, open_source(cut, seed=recipe.seed, shuffle=False), recipe, kind))
    return suites


def _benchmark(recipe: Recipe, name: str, limit: int | None, max_tokens: int | None) -> Suite:
    found = benchmark(name)
    source = open_source(SourceConfig(benchmark=name, limit=limit), seed=recipe.seed, shuffle=False)
    recipe = _answering(recipe, max_tokens or found.max_tokens)
    if recipe.reward is not None:
        graded = [RewardConfig(name=found.reward, options=dict(found.options))]
        recipe = recipe.model_copy(update={"reward": graded})
    return Suite(name, source, recipe, found.kind)


def _answering(recipe: Recipe, longest: int) -> Recipe:
    """Return the recipe with this limit of tokens for each answer."""
    policies = {
        name: policy.model_copy(update={"sampling": policy.sampling.model_copy(update={"max_tokens": longest})})
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def with_context(recipe: Recipe, suites: Sequence[Suite], most: int | None = None) -> Recipe:
    """The recipe with engines that have room for the longest question and its answer, and no more than the model or
    `most` allows."""
    policies = {
        name: policy.model_copy(
            update={"engine": policy.engine.model_copy(update={"context": _context(policy, name, suites, most)})}
        )
        for name, policy in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies})


def _context(policy: PolicyConfig, name: str, suites: Sequence[Suite], most: int | None) -> int:
    renderer = load_renderer(policy)
    needed = max(_longest(renderer, suite.source) + suite.recipe.policies[name].sampling.max_tokens for suite in suites)
    return min(max(needed + _MARGIN, _SHORTEST), most or _model_context(policy.model))


def _longest(renderer: Renderer, source: PromptSource) -> int:
    """Tokens of the longest question."""
    questions = (str(source.at(index).payload.get("question", "")) for index in range(source.length))
    return max((len(renderer.encode(text)) for text in questions), default=0)


def _model_context(model: str) -> int:
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(str(model_folder(model))), "max_position_embeddings", None)
    return int(found) if found else 1 << 20
