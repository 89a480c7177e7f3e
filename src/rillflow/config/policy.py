"""A policy: its model, how it samples, its engine, its stages, and how its weights travel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rillflow.config.base import Name, NonNegative, Positive, Seconds, Section
from rillflow.config.trainer import TrainerConfig
from rillflow.errors import did_you_mean
from rillflow.types import LOWEST_TEMPERATURE

# The formats' classes are the gateway's, in gateway/reading.
TOOL_FORMATS = (
    "auto", "hermes", "qwen3_coder", "glm", "minimax", "seed", "mistral", "mistral_args", "deepseek", "deepseek_r1",
    "kimi", "harmony", "command", "nemotron", "phi", "granite", "llama3", "pythonic", "json",
)  # fmt: skip
REASONING_FORMATS = ("auto", "none", "harmony", "seed", "command", "mistral", "think")

_REPLICAS = ("--data-parallel", "--dp", "-dp")  # in arguments of vLLM's and SGLang's command lines


class SamplingConfig(Section):
    """How a policy samples."""

    wins: Literal["recipe", "agent"] | None = Field(
        None,
        description="whose temperature, top_p and top_k apply if an agent asks for its own: the recipe's or the "
        "agent's; default: the recipe's, but for a workflow its own requests",
    )
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_tokens: Positive = 128

    @field_validator("temperature")
    @classmethod
    def _not_nearly_greedy(cls, value: float) -> float:
        if 0.0 < value < LOWEST_TEMPERATURE:
            raise ValueError(f"must be 0 or at least {LOWEST_TEMPERATURE}")
        return value


class ServerConfig(Section):
    """A vLLM or SGLang server: one that is started and supervised, or one that runs already."""

    url: str | None = Field(
        None, description="of a server that runs already; without it one is started, on loopback, and supervised"
    )
    python: str = Field(
        "python3", description="the interpreter that has vLLM or SGLang installed, where one is started"
    )
    arguments: list[str] = Field(default_factory=list, description="further arguments of the server's command line")
    environment: dict[str, str] = Field(default_factory=dict, description="variables added to its environment")
    tensor_parallel: Positive = Field(1, description="GPUs that one copy of the weights is spread over")
    memory: float = Field(0.4, gt=0, le=1, description="share of a GPU's memory that it may take")
    seeded: bool = Field(
        False,
        description="vLLM: draw by the requests' seeds, so that the same ones give the same answers; slower",
    )
    decodes_deltas: bool | None = Field(
        None,
        description="whether its workers decode deltas, on the device that holds the weights, or the node does, on its "
        "host; default: the workers, if the weights are on a GPU",
    )
    adapters: Literal["auto", "native", "merged", "shared"] = Field(
        "auto",
        description="versions of a policy with trainer.lora: native gives vLLM the adapter alone, which it adds to the "
        "base; merged writes whole weights; auto: native on a GPU if vLLM can, else merged; shared: native, in one "
        "server with all policies of this model and device that say shared",
    )
    start_timeout: Seconds = Field(600.0, description="it must answer so long after it was started")


class EngineConfig(Section):
    kind: Literal["embedded", "vllm", "sglang"] = Field(
        "embedded", description="our own engine in the node's process, or a server of its own (sglang is experimental)"
    )
    slots: Positive = Field(64, description="sequences decoded at once")
    context: Positive = Field(512, description="most tokens of one sequence, prompt and answer together")
    queue: Positive = Field(1024, description="most requests that wait for a slot")
    on_update: Literal["refill", "keep"] = Field(
        "refill",
        description="what becomes of the attention cache of running answers when new weights come: computed again "
        "under them, or kept as it is; keep is for kinds embedded and vllm",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0 …")
    dtype: Literal["fp32", "bf16"] = "fp32"
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.kind == "embedded" and self.server != ServerConfig():
            raise ValueError("engine.server is for engine.kind vllm or sglang")
        if self.kind == "sglang" and self.server.seeded:
            raise ValueError("engine.server.seeded is for engine.kind vllm")
        replicas = [word for word in self.server.arguments if word.startswith(_REPLICAS)]
        if replicas:
            raise ValueError(
                f"engine.server.arguments has {replicas[0]}: a server answers for one replica only, so updates of the "
                "others cannot be verified; start an engine process for each GPU (rollout.engines)"
            )
        adapters = self.server.adapters
        if self.kind == "sglang" and adapters in ("native", "shared"):
            raise ValueError(f"engine.server.adapters {adapters} is for engine.kind vllm: SGLang gets merged weights")
        if adapters == "shared" and self.server.url is not None:
            raise ValueError("engine.server.adapters shared is for servers that are started here: remove url")
        return self


class StageConfig(Section):
    """A stage: workers that add columns to every sample of a policy before its trainer gets it; docs/stages.md."""

    kind: str = Field(description="reference, reward_model, or module:Class or file.py:Class of your own")
    model: str | None = Field(None, description="folder of the model that it runs; for kind reward_model")
    options: dict[str, Any] = Field(default_factory=dict, description="further keyword arguments of its class")
    workers: Positive = Field(1, description="processes that `rillflow run` starts for it")
    groups: Positive = Field(4, description="most groups that a worker handles at once")


Share = Annotated[float, Field(gt=0)]


class WeightsConfig(Section):
    mode: Literal["auto", "full", "delta"] = Field(
        "auto",
        description="full: every version whole; delta: bit-exact differences, and a whole version regularly; "
        "auto: deltas where engine.dtype has 16 bits (in fp32 nearly every weight changes at every step)",
    )
    snapshot_every: Positive = Field(
        20, description="versions from one whole version to the next, where deltas are written"
    )
    keep: Positive = Field(4, description="newest versions that always stay in the store")
    retain: Positive = Field(
        64, description="versions that stay for live nodes which are behind; those further behind take a whole version"
    )
    source: str | None = Field(
        None,
        description="where nodes pull from: the URL of a weight server or relay, or of any fsspec store; default: the "
        "run's own folder",
    )
    streams: Positive = Field(4, description="parts of a file that are fetched at once, over HTTP")
    probe: Literal["auto", "off"] | Share = Field(
        "auto",
        description="how far an engine's log-probs of a version's probe may be from the trainer's before it serves the "
        "version: a number, as a share of their spread; auto: by the dtypes; off: versions have no probe",
    )

    @field_validator("probe", mode="before")
    @classmethod
    def _off_is_no_bool(cls, value: Any) -> Any:
        """YAML takes `off` and `on` for truth values."""
        return {False: "off", True: "auto"}[value] if isinstance(value, bool) else value


class PolicyConfig(Section):
    model: str = Field(description="folder of a Hugging Face model, or `tiny` for the shipped policy")
    staleness: NonNegative | None = Field(None, description="default: dataflow.staleness")
    trains_on: list[Name] | None = Field(
        None, min_length=1, description="policies whose samples its trainer gets; default: its own"
    )
    stages: dict[Name, StageConfig] = Field(
        default_factory=dict,
        description="workers that add columns to every sample before the trainer gets it, by name; docs/stages.md",
    )
    tools: str = Field(
        "auto",
        description="how the model writes tool calls: the name of a format (docs/templates.md) or module:Class; auto "
        "finds it by what the chat template writes for a call",
    )
    reasoning: str = Field(
        "auto",
        description="how the model writes its reasoning: the name of a format (docs/templates.md), module:Class or "
        "none; auto looks at the chat template",
    )
    chat_template: str | None = Field(None, description="file of a chat template that replaces the model's own")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the chat template, such as {enable_thinking: false}; a call's own go before them",
    )
    history: Literal["template", "append"] = Field(
        "template",
        description="where the chat template rewrites earlier answers (it drops old reasoning, say): a call follows "
        "the template and begins a new path, or new messages are appended to what was sampled",
    )
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()

    @field_validator("tools", "reasoning")
    @classmethod
    def _known_format(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tools" else REASONING_FORMATS
        if name not in known and ":" not in name:
            raise ValueError(
                f"{did_you_mean(name, known)}one of {', '.join(known)}, or a class of your own as module:Class"
            )
        return name

    @field_validator("trains_on")
    @classmethod
    def _once(cls, names: list[str] | None) -> list[str] | None:
        """Refuse a policy that is named twice: its samples would wait for a second commit that never comes."""
        if names is not None and len(set(names)) < len(names):
            raise ValueError("it names one twice")
        return names

    @model_validator(mode="after")
    def _adapters_of_lora(self) -> PolicyConfig:
        if self.trainer.lora is None and self.engine.server.adapters != "auto":
            raise ValueError(f"engine.server.adapters {self.engine.server.adapters} is for policies with trainer.lora")
        return self

    @property
    def writes_deltas(self) -> bool:
        """True if its versions are published as deltas, false if each is published whole."""
        mode, narrow = self.weights.mode, self.engine.dtype == "bf16"
        # Adapters are small, and every weight of them changes at every step.
        return self.trainer.lora is None and (mode == "delta" or (mode == "auto" and narrow))

    @property
    def proves(self) -> bool:
        """True if engines must reproduce a version's probe before they serve it."""
        return self.weights.probe != "off"
