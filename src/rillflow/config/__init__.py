"""One schema per part; unknown keys are refused with the nearest valid name."""

from rillflow.config.agents import McpConfig, RewardConfig, ToolConfig
from rillflow.config.algorithm import CriticConfig, KlConfig, OverlongConfig
from rillflow.config.engine import EngineConfig, ServerConfig
from rillflow.config.load import load_recipe, recipes, resolve_object, write_resolved
from rillflow.config.resources import ResourcesConfig, ScalingConfig, WorkersConfig
from rillflow.config.schema import (
    CommandConfig,
    DataConfig,
    DataflowConfig,
    EvaluationConfig,
    GatewayConfig,
    HookConfig,
    ObserveConfig,
    PauseConfig,
    PolicyConfig,
    Recipe,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    SourceConfig,
    UnitsConfig,
)
from rillflow.config.stages import StageConfig
from rillflow.config.trainer import LoraConfig, NodeConfig, TrainerConfig
from rillflow.config.weights import WeightsConfig

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
