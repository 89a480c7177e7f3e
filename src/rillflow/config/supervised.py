"""What a recipe of `rillflow fit` may say: supervised training of a policy, a reward model or a process reward model.

Keys that only reinforcement learning has are refused, and so are options that the task does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, model_validator

from rillflow.config.base import Name, NonNegative, Positive, Section
from rillflow.config.load import FIT, parse, read_raw, validated
from rillflow.config.rollout import SourceConfig
from rillflow.config.runs import TrackersConfig
from rillflow.config.trainer import AlgorithmConfig, TrainerConfig
from rillflow.errors import ConfigError

Task = Literal["sft", "reward", "process_reward"]
# Keys of the trainer that concern rollouts and their batches.
_ROLLED_OUT = {*AlgorithmConfig.model_fields, "stream_groups", "updates", "epochs", "publish_delay", "batch_wait"}
_OPTION_OF: dict[str, Task] = {
    "train_on": "sft",
    "centring": "reward",
    "loss": "process_reward",
    "separator": "process_reward",
}


class FitDataConfig(Section):
    """Rows to learn from. Their shapes are those of the task (docs: supervised training)."""

    train: SourceConfig = Field(description="rows to train on")
    heldout: SourceConfig | None = Field(None, description="rows to evaluate on; never trained")
    shuffle: bool = Field(True, description="a new order every epoch, fixed by the seed")
    epochs: Positive | None = Field(
        None, description="passes over the rows; with trainer.steps as well, whichever ends first"
    )
    longest: Positive | None = Field(
        None, description="rows of more tokens are left out, and counted; default: what the model can read"
    )


class FitRuntimeConfig(Section):
    deterministic: bool = Field(False, description="a resumed run is bit-identical (slow)")
    threads: NonNegative = Field(1, description="torch threads of each process; 0 leaves torch's default")


class FitObserveConfig(Section):
    trackers: TrackersConfig = TrackersConfig()


class FitRecipe(Section):
    """Supervised training on rows that do not change."""

    name: Name
    description: str = ""
    task: Task = Field(description="what is learned: answers, which of two answers is better, or how good each step is")
    model: str = Field(description="folder of a Hugging Face model, or `tiny` for the shipped policy")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    train_on: Literal["all", "last"] | None = Field(
        None, description="of sft: every assistant message of a conversation, or only its last; default all"
    )
    centring: Annotated[float, Field(ge=0)] | None = Field(
        None, description="of reward: factor of a term that keeps the scores of a pair centred at 0; default 0"
    )
    loss: Literal["bce", "mse"] | None = Field(
        None,
        description="of process_reward: cross-entropy of the score's sigmoid, or its squared error; default bce",
    )
    separator: str | None = Field(
        None, description="of process_reward: text behind each step that is text; default a line break"
    )
    data: FitDataConfig
    trainer: TrainerConfig = Field(
        TrainerConfig(),
        description="as of `rillflow run`, without the keys of algorithms and rollouts; a group is a row, or a pair",
    )
    evaluate_every: NonNegative = Field(
        0, description="optimizer steps between two looks at the held-out rows; 0: before and after training only"
    )
    observe: FitObserveConfig = FitObserveConfig()
    runtime: FitRuntimeConfig = FitRuntimeConfig()

    @model_validator(mode="after")
    def _fits(self) -> FitRecipe:
        for name, task in _OPTION_OF.items():
            if getattr(self, name) is not None and self.task != task:
                raise ValueError(f"{self.task} has no {name}: it is an option of {task}")
        for name in sorted(_ROLLED_OUT):
            default = TrainerConfig.model_fields[name].get_default(call_default_factory=True)
            if getattr(self.trainer, name) != default:
                raise ValueError(f"trainer.{name} is of reinforcement learning: supervised training has no use for it")
        if self.trainer.schedule != "constant" and not self.bounded:
            raise ValueError("trainer.schedule needs trainer.steps: the learning rate falls until the last of them")
        if self.trainer.lora is not None and self.task != "sft":
            raise ValueError("trainer.lora is for sft: the head of a reward model is not an adapter")
        for source in (self.data.train, self.data.heldout):
            if source is not None and source.reasoning_gym is not None:
                raise ValueError("reasoning_gym gives prompts without answers: give path, dataset or generator")
        return self

    @field_serializer("trainer")
    def _own_keys(self, trainer: TrainerConfig) -> dict[str, Any]:
        """Without what has no meaning here, so that what is written can be read again."""
        return trainer.model_dump(mode="json", exclude=_ROLLED_OUT | (set() if self.bounded else {"steps"}))

    @property
    def bounded(self) -> bool:
        """Whether trainer.steps ends the training: where epochs do, its default does not count."""
        return self.data.epochs is None or "steps" in self.trainer.model_fields_set


def load_fit(name: str, overrides: Sequence[str] = ()) -> FitRecipe:
    """The validated recipe, with file references made absolute."""
    return _checked(read_raw(name, overrides))


def read_resolved_fit(path: Path) -> FitRecipe:
    """The recipe that a run folder holds, perhaps changed by hand since."""
    return _checked(parse(path))


def _checked(raw: dict[str, Any]) -> FitRecipe:
    if FIT not in raw and "policies" in raw:
        raise ConfigError(
            "the recipe has `policies` and no `task`: it is for reinforcement learning",
            "use `rillflow run`, or `rillflow resume` for a run folder",
        )
    return validated(raw, FitRecipe)
