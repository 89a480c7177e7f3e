"""The protocols between the parts. A part is exchangeable when it keeps the promises written here.

Contracts name no implementation: `dataflow`, `rollout` and `trainer` meet only through these and `types`.
"""

from typing import TYPE_CHECKING

from rillflow.contracts.parts import (
    UNKNOWN,
    Change,
    Clock,
    DecodesDeltas,
    Deltas,
    Engine,
    Executor,
    Generator,
    Patch,
    StorageUnit,
    SystemClock,
    TakesAdapters,
    TakesTurns,
    TokenSource,
    Trainer,
    Turn,
    WeightStore,
)
from rillflow.contracts.user_code import (
    Curator,
    Environment,
    Episode,
    Filter,
    Group,
    GroupReward,
    PromptGenerator,
    PromptSource,
    ReadyGroup,
    Replayer,
    Role,
    Sampler,
    Stateful,
    Tool,
    Toolbox,
)

if TYPE_CHECKING:
    from rillflow.contracts.parts import Buffer, Tensors

__all__ = [
    "UNKNOWN",
    "Buffer",
    "Change",
    "Clock",
    "Curator",
    "DecodesDeltas",
    "Deltas",
    "Engine",
    "Environment",
    "Episode",
    "Executor",
    "Filter",
    "Generator",
    "Group",
    "GroupReward",
    "Patch",
    "PromptGenerator",
    "PromptSource",
    "ReadyGroup",
    "Replayer",
    "Role",
    "Sampler",
    "Stateful",
    "StorageUnit",
    "SystemClock",
    "TakesAdapters",
    "TakesTurns",
    "Tensors",
    "TokenSource",
    "Tool",
    "Toolbox",
    "Trainer",
    "Turn",
    "WeightStore",
]
