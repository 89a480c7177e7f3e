"""A run: its workers and their tags, its processes and their number, its evaluations, and what it keeps and sends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rillflow.config.base import Name, NonNegative, Positive, Seconds, Section

Tag = Literal["rollout", "train"]
PositiveFloat = Annotated[float, Field(gt=0)]


class WorkersConfig(Section):
    """Some workers of one kind, by what they are able to do."""

    tags: list[Tag] = Field(min_length=1, description="what such a worker can do: rollout, train, or both")
    count: Positive = Field(1, description="how many of them")
    policy: Name | None = Field(None, description="which policy it can train; default: the recipe's first")
    tflops: PositiveFloat | None = Field(None, description="peak compute in TFLOP/s; default: measured at its start")
    bandwidth: PositiveFloat | None = Field(None, description="memory bandwidth in GB/s; default: measured")

    @field_validator("tags")
    @classmethod
    def _once(cls, tags: list[Tag]) -> list[Tag]:
        if len(set(tags)) < len(tags):
            raise ValueError("it names one twice")
        return tags


class ScalingConfig(Section):
    """The maintainer: it starts and retires rollout nodes as the balance report asks for."""

    enabled: bool = Field(False, description="whether `rillflow run` starts a maintainer")
    least: Positive = Field(1, description="nodes that there are at least")
    most: Positive = Field(8, description="nodes that there are at most")
    cooldown: Seconds = Field(60.0, description="least seconds between two changes of the pool")
    dry_run: bool = Field(False, description="only say what would be done")
    executor: Literal["local", "ray", "command"] = Field(
        "local", description="where nodes run: processes on this machine, Ray actors, or what the commands below start"
    )
    start: str | None = Field(
        None, description="command that starts a node, for executor command; {node}, {url} and {token_file} are filled"
    )
    stop: str | None = Field(None, description="command that ends the node {node} after it was drained")
    alive: str | None = Field(None, description="command that succeeds while the node {node} exists")
    drain: Seconds = Field(120.0, description="seconds that a retired node has to finish its episodes")

    @model_validator(mode="after")
    def _consistent(self) -> ScalingConfig:
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is more than most ({self.most})")
        if self.executor == "command" and not (self.start and self.stop):
            raise ValueError("executor=command needs `start` and `stop`")
        return self


class ResourcesConfig(Section):
    workers: list[WorkersConfig] | None = Field(
        None,
        description="workers by their tags, in place of runtime.mode and rollout.nodes; of those that can train, "
        "trainer.ranks train each policy",
    )
    on_preempt: Literal["pause", "move"] = Field(
        "pause",
        description="what becomes of the answers under way on a worker that turns to training: they wait for it, or "
        "go on at other engines",
    )
    memory: Literal["keep", "release"] = Field(
        "keep",
        description="whether a worker that can do both keeps the memory of what it does not do at present; release: "
        "the engine's cache goes while it trains, the optimizer's state is set aside while it samples",
    )
    grace: Seconds = Field(60.0, description="seconds that a trainer whose workers change has for its checkpoint")
    scaling: ScalingConfig = ScalingConfig()


class RuntimeConfig(Section):
    mode: Literal["asynchronous", "colocated", "multiplexed"] = Field(
        "asynchronous",
        description="nodes and trainers at work at once, each worker with one tag; colocated: all workers have both "
        "tags and generate a batch, then train on it; multiplexed: trainers have both and sample while they wait, "
        "beside nodes that only sample",
    )
    deterministic: bool = Field(
        False,
        description="on-policy, one sequence per forward pass: a resumed run is bit-identical, and engine and trainer "
        "agree to the bit (slow)",
    )
    host: str = "127.0.0.1"
    port: NonNegative = Field(0, description="of the dataflow service; 0 takes any free one")
    threads: NonNegative = Field(1, description="torch threads of each process; 0 leaves torch's default")
    restarts: NonNegative = Field(
        5,
        description="how often in a row a process that died is started again before the run fails; those before the "
        "last five minutes in which the run got on are forgotten",
    )
    start_timeout: Seconds = 120.0
    preload: bool = Field(
        True,
        description="import torch once, in a process that trainers and nodes of this machine are forked from (Linux); "
        "false starts each as a new process",
    )
    weights_server: bool = Field(
        False, description="serve the run's weights over HTTP, for nodes and relays that do not see its folder"
    )
    weights_port: NonNegative = Field(
        0, description="of the weight server; 0 takes any free one, and the same again after a restart"
    )


# ---------------------------------------------------------------- evaluations, and what is kept and sent


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
