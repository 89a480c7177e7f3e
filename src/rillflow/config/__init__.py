"""One schema per part; unknown keys are refused with the nearest valid name."""

from rillflow.config.load import load_recipe, recipes, resolve_object, write_resolved
from rillflow.config.policy import EngineConfig, PolicyConfig, SamplingConfig, ServerConfig, StageConfig, WeightsConfig
from rillflow.config.rollout import (
    CommandConfig,
    DataConfig,
    DataflowConfig,
    GatewayConfig,
    HookConfig,
    McpConfig,
    PauseConfig,
    RewardConfig,
    RolloutConfig,
    SourceConfig,
    ToolConfig,
    UnitsConfig,
)
from rillflow.config.runs import (
    EvaluationConfig,
    ObserveConfig,
    ResourcesConfig,
    RuntimeConfig,
    ScalingConfig,
    WorkersConfig,
)
from rillflow.config.schema import Recipe
from rillflow.config.trainer import CriticConfig, KlConfig, LoraConfig, NodeConfig, OverlongConfig, TrainerConfig

__all__ = [
    "CommandConfig",
    "CriticConfig",
    "DataConfig",
    "DataflowConfig",
    "EngineConfig",
    "EvaluationConfig",
    "GatewayConfig",
    "HookConfig",
    "KlConfig",
    "LoraConfig",
    "McpConfig",
    "NodeConfig",
    "ObserveConfig",
    "OverlongConfig",
    "PauseConfig",
    "PolicyConfig",
    "Recipe",
    "ResourcesConfig",
    "RewardConfig",
    "RolloutConfig",
    "RuntimeConfig",
    "SamplingConfig",
    "ScalingConfig",
    "ServerConfig",
    "SourceConfig",
    "StageConfig",
    "ToolConfig",
    "TrainerConfig",
    "UnitsConfig",
    "WeightsConfig",
    "WorkersConfig",
    "load_recipe",
    "recipes",
    "resolve_object",
    "write_resolved",
]
