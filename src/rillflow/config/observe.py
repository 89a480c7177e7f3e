"""Evaluations, and the trackers, traces and trajectories of a run.

No setting is a key or a password: these come from the environment (`WANDB_API_KEY`, `MLFLOW_TRACKING_TOKEN`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from rillflow.config.base import NonNegative, Positive, Section


class EvaluationConfig(Section):
    every: NonNegative = Field(0, description="versions between evaluations; 0: before and after training only")
    repeats: Positive = Field(1, description="episodes of each held-out prompt")
    target: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None,
        description="held-out reward that ends the run, as soon as an evaluation without failed episodes has reached "
        "it; trainer.steps stays the upper bound",
    )


_NAME = "of the run there; default: the name of the run folder"


class WandbConfig(Section):
    project: str = "rillflow"
    entity: str | None = Field(None, description="user or team; default: that of the API key")
    name: str | None = Field(None, description=_NAME)
    tags: list[str] = Field(default_factory=list)
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: written to RUN/trackers/wandb, and uploaded later by `wandb sync`"
    )


class MlflowConfig(Section):
    tracking_uri: str | None = Field(None, description="of the server; default: MLFLOW_TRACKING_URI")
    experiment: str = Field("rillflow", description="made if it does not exist")
    name: str | None = Field(None, description=_NAME)
    tags: dict[str, str] = Field(default_factory=dict)


class JsonlConfig(Section):
    path: str | None = Field(
        None, description="of a file that JSON lines are appended to; default: RUN/trackers/scalars.jsonl"
    )


class TrackersConfig(Section):
    tensorboard: bool = Field(True, description="event files in RUN/tensorboard")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases; `{}` takes the defaults")
    mlflow: MlflowConfig | None = None
    jsonl: JsonlConfig | None = None


class OpenTelemetryConfig(Section):
    endpoint: str = Field(
        description="where spans are sent by OTLP over HTTP, such as http://collector:4318/v1/traces; headers come "
        "from OTEL_EXPORTER_OTLP_HEADERS"
    )


class TrajectoriesConfig(Section):
    """The number of trajectories that a run keeps for people, apart from the rows that training needs. Older ones are
    removed so that the rest stays spread over the run."""

    max_bytes: NonNegative = Field(256 << 20, description="of the file; 0 keeps none")
    per_step: NonNegative = Field(2, description="drawn from each step, beside its best and its worst")
    per_evaluation: NonNegative = Field(16, description="drawn from each evaluation: of the same prompts each time")
    sample: NonNegative = Field(1500, description="most of those that were drawn from steps")
    best: NonNegative = Field(500, description="most of the steps' best")
    worst: NonNegative = Field(500, description="most of the steps' worst")
    failure: NonNegative = Field(500, description="most of the episodes that failed")
    evaluation: NonNegative = Field(1000, description="most of the evaluations'")

    @property
    def keeps_failures(self) -> bool:
        return self.max_bytes > 0 and self.failure > 0

    @field_validator("max_bytes")
    @classmethod
    def _enough(cls, given: int) -> int:
        if 0 < given < 1 << 20:
            raise ValueError("give at least 1048576 bytes, or 0 to keep none")
        return given


class ObserveConfig(Section):
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    trackers: TrackersConfig = TrackersConfig()
    opentelemetry: OpenTelemetryConfig | None = Field(None, description="sends the run's spans to a receiver")
    plot: bool = Field(True, description="draw reward.png and timeline.png at the end of a run")
