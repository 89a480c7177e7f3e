"""An advisory (a problem or a possible improvement, with its numbers and what to do next), the thresholds of the rules,
and the facts of a run that they are given.

A false advisory costs more trust than a late one, so every threshold is far from the values of healthy runs of the
shipped recipes. `rillflow advise` prints the measured number beside the threshold. Facts are plain data: one `Facts`
can be written as JSON and read again.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from rillflow.dataflow.ledger_facts import LedgerFacts
from rillflow.types import GOOD_ENDS

Severity = Literal["problem", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "hint")  # the gravest first


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """`key` names the rule, `title` says what was found in one sentence with its number, `why` has the numbers behind
    it. `since` is when it began, in seconds since the epoch; None where that is unknown."""

    key: str
    severity: Severity
    title: str
    why: str
    what_to_do: str
    since: float | None = None


class Threshold(NamedTuple):
    value: float
    reason: str


THRESHOLDS: dict[str, Threshold] = {
    # learning
    "rewards_equal": Threshold(128, "rewards; a policy that succeeds in 2 % of its episodes rarely fails so often"),
    "length_correlation": Threshold(0.8, "of reward and length; healthy runs show up to 0.4"),
    "length_growth": Threshold(1.2, "times the first steps' length; a correlation alone may be the task's nature"),
    "length_samples": Threshold(64, "samples before a correlation says anything"),
    "high_kl": Threshold(0.3, "nats, median of the last steps; single steps of tiny batches reach 1, medians 0.02"),
    "high_clip": Threshold(0.4, "of all tokens, median of the last steps; healthy runs clip up to 0.12 in one step"),
    "reward_fall": Threshold(0.5, "of the best mean of a few steps is left; noise of small batches stays above it"),
    "grown_gradient": Threshold(20, "times the first steps' gradient norm, median; healthy runs grow up to 5 times"),
    "entropy_collapse": Threshold(0.1, "of the first steps' entropy is left while the reward has not risen"),
    "length_collapse": Threshold(0.3, "of the first steps' length is left while the reward has not risen"),
    "truncated": Threshold(0.5, "of the samples; a tiny policy cuts up to 0.06 of its answers when it starts"),
    "apart": Threshold(0.05, "nats between engine and trainer; the same precision shows 0.001 to 0.02"),
    "one_sided": Threshold(0.7, "of a difference has one sign where a distribution is cut; rounding errors have none"),
    "as_stale": Threshold(0.5, "times the difference of older versions, up to twice: weights do not follow"),
    "other_weights": Threshold(0.5, "nats; cutting a distribution moves a token by less, another model by more"),
    "answers": Threshold(16, "kept answers before their shares say anything"),
    "repeating": Threshold(0.5, "of the kept answers repeat something at their end; healthy runs have none"),
    "same_answers": Threshold(0.9, "of the kept answers are one text, though their prompts differ"),
    "few_steps": Threshold(4, "steps on each side of a comparison: one step is noise"),
    # episodes
    "failed": Threshold(0.2, "of the episodes; retries hide fewer, and each costs an episode's time"),
    "failed_count": Threshold(4, "episodes: one or two failures are an accident"),
    "tool_errors": Threshold(0.2, "errors of a tool for each episode; a policy's own bad arguments stay below"),
    "forks": Threshold(0.8, "of the calls that could go on begin a new path; subagents and retries fork now and then"),
    # fleet
    "slow_node": Threshold(4, "times the others' median seconds of an episode; busy machines show up to 3"),
    "node_episodes": Threshold(3, "episodes of a node before its pace says anything"),
    "failing_node": Threshold(0.5, "of a node's episodes fail, while the others' fail half as often or less"),
    "stale_versions": Threshold(4, "versions behind the newest, beyond the recipe's own bound"),
    # flow
    "stall": Threshold(60, "seconds without a step, and five times the longest pause before"),
    "first_step": Threshold(300, "seconds before the first step: large models load and compile that long"),
    "silence": Threshold(60, "seconds without a sign of life of a run that says it is running"),
    "disk_free": Threshold(0.02, "of the disk is free; a checkpoint may need as much"),
    # hints
    "trainer_waits": Threshold(0.5, "of the trainer's time; below, generation and training overlap well"),
    "nodes_wait": Threshold(0.5, "of the rollout workers' time"),
    "dropped_stale": Threshold(0.1, "of the ended groups became too old: a tenth of the generation is wasted"),
    "flat_groups": Threshold(0.5, "of the complete groups had equal rewards: half of the generation trains nothing"),
}


def threshold(name: str) -> float:
    return THRESHOLDS[name].value


# ---------------------------------------------------------------- facts


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
