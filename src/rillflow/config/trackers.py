"""Where a run's numbers are sent while it runs (`observe.trackers`).

No setting is a key or a password: these come from the environment (`WANDB_API_KEY`, `MLFLOW_TRACKING_TOKEN`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rillflow.config.base import Section

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
