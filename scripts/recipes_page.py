"""Make docs/recipes.md, all recipe keys, from the schema (`scripts/reference_pages.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rillflow.config import policy, rollout, runs, schema, supervised, trainer

SECTIONS: dict[str, type[BaseModel]] = {
    "top level": schema.Recipe,
    "command": rollout.CommandConfig,
    "reward (a list)": rollout.RewardConfig,
    "tools": rollout.ToolConfig,
    "tools.mcp": rollout.McpConfig,
    "data": rollout.DataConfig,
    "data.prompts, data.heldout": rollout.SourceConfig,
    "policies.NAME": policy.PolicyConfig,
    "policies.NAME.sampling": policy.SamplingConfig,
    "policies.NAME.engine": policy.EngineConfig,
    "policies.NAME.engine.server": policy.ServerConfig,
    "policies.NAME.weights": policy.WeightsConfig,
    "policies.NAME.stages.NAME": policy.StageConfig,
    "trainer, policies.NAME.trainer": trainer.TrainerConfig,
    "trainer.critic": trainer.CriticConfig,
    "trainer.kl": trainer.KlConfig,
    "trainer.overlong": trainer.OverlongConfig,
    "trainer.lora": trainer.LoraConfig,
    "trainer.graph, trainer.nodes": trainer.NodeConfig,
    "dataflow": rollout.DataflowConfig,
    "dataflow.units": rollout.UnitsConfig,
    "rollout": rollout.RolloutConfig,
    "rollout.pause_after": rollout.PauseConfig,
    "gateway": rollout.GatewayConfig,
    "evaluation": runs.EvaluationConfig,
    "observe": runs.ObserveConfig,
    "observe.trajectories": runs.TrajectoriesConfig,
    "observe.trackers": runs.TrackersConfig,
    "observe.trackers.wandb": runs.WandbConfig,
    "observe.trackers.mlflow": runs.MlflowConfig,
    "observe.trackers.jsonl": runs.JsonlConfig,
    "observe.opentelemetry": runs.OpenTelemetryConfig,
    "resources": runs.ResourcesConfig,
    "resources.workers": runs.WorkersConfig,
    "resources.scaling": runs.ScalingConfig,
    "runtime": runs.RuntimeConfig,
    "top level (rillflow fit)": supervised.FitRecipe,
    "data (rillflow fit)": supervised.FitDataConfig,
    "observe (rillflow fit)": supervised.FitObserveConfig,
    "runtime (rillflow fit)": supervised.FitRuntimeConfig,
}

_HEAD = """# Recipes

A recipe is a YAML file. `rillflow run RECIPE key=value …` overrides keys by their dotted path
(`trainer.lr=1e-4`, `data.prompts.0.limit=100`), and `rillflow run RECIPE --dry-run` prints the resolved recipe.
`extends: other` starts from another recipe and changes what the file says. A top-level `trainer:` is shared by all
policies. Paths are relative to the recipe, in overrides to where you are. Unknown keys are refused with the nearest
valid name. A recipe with a `task` is for `rillflow fit`; its sections stand at the end of this page.
"""


def reference() -> str:
    return "\n".join([_HEAD, *(line for title, model in SECTIONS.items() for line in _section(title, model))])


def _section(title: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description or ''} |"
    yield ""


def _type(annotation: Any) -> str:
    if isinstance(annotation, type):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    if str(get_origin(annotation)) == "typing.Literal":
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (dict, list, tuple):
        return str(get_origin(annotation).__name__)
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return _type(parts[0]) if parts else str(annotation)


def _default(field: Any) -> str:
    default = _plain(field.get_default(call_default_factory=True))
    if default is PydanticUndefined:
        return "required"
    return "" if isinstance(default, BaseModel) or default in (None, "", {}, []) else f"`{default}`"


def _plain(value: Any) -> Any:
    """Return the name of a data algorithm, as recipes write it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, rollout.HookConfig) else value
