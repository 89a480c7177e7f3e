"""Everything that the rules know of a run, as plain data: one `Facts` can be written as JSON and read again."""

from __future__ import annotations

import msgspec

from rillflow.dataflow.ledger_facts import LedgerFacts
from rillflow.types import GOOD_ENDS

LARGEST = 1e100  # a larger number, or NaN, counts as missing: sums must not overflow


class Step(msgspec.Struct, frozen=True):
    """One optimizer step. Each number has the name that it has in `metrics.jsonl`; None where it has none."""

    step: int
    time: float | None = None
    reward: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    skipped: float | None = None
    approx_kl: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    entropy: float | None = None
    response_length: float | None = None
    truncated: float | None = None
    wait_fraction: float | None = None
    zero_variance_fraction: float | None = None
    apart: float | None = msgspec.field(default=None, name="consistency/mean")
    shift: float | None = msgspec.field(default=None, name="consistency/shift")
    stale_apart: float | None = msgspec.field(default=None, name="consistency/stale_mean")

    @property
    def clipped(self) -> float | None:
        return None if self.clip_low is None or self.clip_high is None else self.clip_low + self.clip_high


class Evaluation(msgspec.Struct, frozen=True):
    step: int
    reward: float


class Refusal(msgspec.Struct, frozen=True):
    """An engine that does not reproduce the log-probs of a version and serves nothing."""

    worker: str
    policy: str
    version: int
    cause: str
    why: str


class AnswerFacts(msgspec.Struct, frozen=True):
    """The latest kept answers of a policy, and the number of different prompts that they answer. `cut` counts answers
    cut at their token limit, `repeating` those that end in a repetition, `cut_repeating` those that do both. `same`
    counts the answers equal to `text`, the most common one, and `same_prompts` their different prompts. `repeated`
    shows one that repeats itself, with its episode."""

    count: int
    prompts: int
    cut: int = 0
    repeating: int = 0
    cut_repeating: int = 0
    repeated: str = ""
    same: int = 0
    same_prompts: int = 0
    text: str = ""


class Settings(msgspec.Struct, frozen=True):
    """What advice needs of the recipe. `probed` says whether engines prove their weights; `cuts` what makes a policy
    sample from another distribution than the model's, `dtypes` the precisions of engine and trainer."""

    staleness: int = 4
    max_tokens: dict[str, int] = {}
    lr: dict[str, float] = {}
    episode_timeout: float = 60.0
    filters: bool = True
    on_policy: bool = False
    probed: dict[str, bool] = {}
    cuts: dict[str, str] = {}
    dtypes: dict[str, tuple[str, str]] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`started` is when the run began, or went on. It is `live` where its service answers, and `held` where a
    supervisor works on its folder; `waits` are what the service waits for. `idle` is the share of its time that each
    worker did nothing, `disk_free` of the disk that is left. `unread` says which parts could not be read."""

    now: float
    state: str = "new"
    reason: str = ""
    live: bool = False
    held: bool = False
    started: float | None = None
    settings: Settings = Settings()
    policies: dict[str, list[Step]] = {}
    heldout: list[Evaluation] = []
    ledger: LedgerFacts = LedgerFacts()
    waits: list[str] = []
    refusals: list[Refusal] = []
    answers: dict[str, AnswerFacts] = {}
    no_space: str = ""
    disk_free: float | None = None
    idle: dict[str, float] = {}
    unread: list[str] = []

    @property
    def ended_well(self) -> bool:
        return self.state == "finished" and self.reason in GOOD_ENDS

    @property
    def episodes(self) -> int:
        """Episodes that have ended, well or badly."""
        return self.ledger.completed + self.ledger.failed
