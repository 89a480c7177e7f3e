"""One schema per part; unknown keys are refused with the nearest valid name."""

from rillflow.config.load import load_recipe, recipes, resolve_object, write_resolved
from rillflow.config.schema import (
    DataConfig,
    DataflowConfig,
    EngineConfig,
    EvaluationConfig,
    HookConfig,
    ObserveConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    SourceConfig,
    TrainerConfig,
    UnitsConfig,
)

__all__ = [
    "DataConfig",
    "DataflowConfig",
    "EngineConfig",
    "EvaluationConfig",
    "HookConfig",
    "ObserveConfig",
    "PolicyConfig",
    "Recipe",
    "RolloutConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "SourceConfig",
    "TrainerConfig",
    "UnitsConfig",
    "load_recipe",
    "recipes",
    "resolve_object",
    "write_resolved",
]
