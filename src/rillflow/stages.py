"""The stages of a policy: workers that handle every sample before its trainer gets it, and add columns to it.

A class of your own is named by its path. It is made once in each worker, with the recipe, the name of its policy and
the options of its section, and then gets the samples of a few groups at a time:

    class Novelty:
        gives = ("novelty_R",)

        def __init__(self, recipe, policy, *, scale: float = 1.0): …

        def columns(self, data):
            return {"novelty_R": …}

Shipped are the log-probs of the reference model and the scores of a reward model. The reference model, for the KL term,
is the one that the trainer would run itself (`trainer.kl.reference`, or the initial weights of the policy), by the same
code and at the same temperatures, so the numbers are the same up to the rounding of differently packed rows.

A reward model is a causal model with a head of one number, as `rillflow fit` trains them. It reads the tokens of a
sample without retokenising, so it must share the tokenizer of the policy. The score of an answer is taken at its last
token. A sample with several answers (turns) has the score of its last one, or the mean or the least of all (`over`),
as process reward models are used.

A worker leases groups, reads their samples, computes columns, writes them and commits, until the run has ended. Columns
are durable in a storage unit before they are committed. A lease is renewed while the stage computes and expires when
the worker dies, so a kill costs the work on one lease. Columns of groups that another worker has taken over are
dropped. Every call is idempotent under the attempt id of its lease.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from rillflow.clients.ledgers import connect
from rillflow.clients.payloads import Arrays, DamagedRows, PayloadReader
from rillflow.clients.units import UnitWriter
from rillflow.config import Recipe, StageConfig, resolve_object
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import ConfigError, DeadlineExceeded, LeaseLost, RunError, StorageError, Unavailable, did_you_mean
from rillflow.storage import startup
from rillflow.storage.spans import NoSpans, Spans
from rillflow.trainer.batches import (
    REFERENCE,
    SCORE,
    Databuffer,
    columns_of,
    columns_of_stage,
    make_rows,
    payload_name,
    staged_columns,
)
from rillflow.trainer.forward import PolicyForward, ScalarForward
from rillflow.trainer.graph.builtin import chain_of
from rillflow.trainer.learner import Learner
from rillflow.trainer.parallel import Alone
from rillflow.trainer.remote_stream import Renewal
from rillflow.trainer.roles import reward_model
from rillflow.types import Batch, CommitStage, LeaseStage, LoseRows, Row, SampleColumns
from rillflow.weights.model_folder import facts_of
from rillflow.weights.models import load_policy_model, load_tokenizer, pick_device

if TYPE_CHECKING:
    import numpy.typing as npt

    from rillflow.trainer.batches import Column

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- log-probs of the reference model


class ReferenceLogprobs:
    def __init__(self, recipe: Recipe, policy: str) -> None:
        settings = recipe.policies[policy]
        config = settings.trainer.model_copy(update={"sharding": "none"})
        folder = config.kl.reference if config.kl is not None else None
        model = load_policy_model(folder or settings.model, config.dtype, pick_device(config.device))
        self._learner = Learner(
            "reference",
            model.requires_grad_(False),
            PolicyForward(model, config),
            None,
            config,
            Alone(),
            in_order=recipe.runtime.deterministic,
        )

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        return {REFERENCE: self._learner.infer(data)}


# ---------------------------------------------------------------- a reward model


Over = Literal["last", "mean", "min"]


class RewardScores:
    """A reward model as a stage. The trainer adds `weight` times the score to the reward."""

    def __init__(self, recipe: Recipe, policy: str, *, model: str, weight: float = 1.0, over: Over = "last") -> None:
        if over not in _OVER:
            raise ConfigError(f"a reward model has no `over: {over}`", f"one of: {', '.join(_OVER)}")
        settings = recipe.policies[policy]
        _check_vocabulary(model, settings.model)
        config = settings.trainer.model_copy(update={"sharding": "none", "lora": None, "trees": False})
        loaded = reward_model(model, pick_device(config.device), config)
        self._learner = Learner("reward", loaded, ScalarForward(loaded, config), None, config, Alone())
        facts = facts_of(model)
        self._sigmoid = facts.task == "process_reward" and facts.loss != "mse"
        self._weight = weight
        self._over = _OVER[over]

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        end_N = answer_ends(data)
        scored = Databuffer(replace(data.rows, mask_N=end_N))
        score_N = self._learner.infer(scored).astype(np.float64)
        if self._sigmoid:
            score_N = 1.0 / (1.0 + np.exp(-score_N))
        of_rows = np.split(np.where(end_N, score_N, np.nan), data.rows.start_R[1:])
        of_answers = (row[~np.isnan(row)] for row in of_rows)
        return {
            SCORE: self._weight * np.array([self._over(score_A) if len(score_A) else 0.0 for score_A in of_answers])
        }


_OVER: dict[Over, Callable[[npt.NDArray[np.float64]], float]] = {
    "last": lambda score_A: float(score_A[-1]),
    "mean": lambda score_A: float(score_A.mean()),
    "min": lambda score_A: float(score_A.min()),
}


def answer_ends(data: Databuffer) -> npt.NDArray[np.bool_]:
    """Return where an answer ends: trained tokens that are followed by one that is not, or by another sample."""
    mask_N = data.rows.mask_N
    following_N = np.append(mask_N[1:], False)
    following_N[data.rows.start_R[1:] - 1] = False
    ends: npt.NDArray[np.bool_] = mask_N & ~following_N
    return ends


def _check_vocabulary(model: str, policy: str) -> None:
    if load_tokenizer(model).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"the reward model {model} has another tokenizer than the policy {policy}",
            "a stage scores the policy's own tokens; use the model in a reward function instead (docs/rewards.md)",
        )


# ---------------------------------------------------------------- a stage from its section of the recipe


class Stage(Protocol):
    """Makes columns for samples. It is called from one thread; an exception ends its worker."""

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        """Return the columns that its class declares as `gives`: a value per token (`_N`) or per sample (`_R`)."""


SHIPPED: dict[str, Callable[..., Stage]] = {"reference": ReferenceLogprobs, "reward_model": RewardScores}


def check_stages(recipe: Recipe) -> None:
    """Raise ConfigError if a stage cannot work, or nothing would read its columns. Loads no model."""
    for settings in recipe.policies.values():
        for name, config in settings.stages.items():
            _check_options(name, config)
        chain_of(settings.trainer, recipe.mode, staged=staged_columns(settings.stages))


def build_stage(recipe: Recipe, policy: str, name: str) -> Stage:
    config = recipe.policies[policy].stages[name]
    _check_options(name, config)
    return _Checked(name, columns_of_stage(name, config), _class_of(config)(recipe, policy, **_options(config)))


def _class_of(config: StageConfig) -> Callable[..., Stage]:
    found: Callable[..., Stage] = SHIPPED.get(config.kind) or resolve_object(config.kind)
    return found


def _options(config: StageConfig) -> dict[str, Any]:
    return config.options | ({} if config.model is None else {"model": config.model})


def _check_options(name: str, config: StageConfig) -> None:
    """Raise ConfigError if an option is not a parameter of the class, or a required one is missing."""
    columns_of_stage(name, config)  # refuses an unknown kind
    parameters = list(inspect.signature(_class_of(config)).parameters.values())[2:]
    valid = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    given = _options(config)
    for option in given if len(valid) == len(parameters) else ():
        if option not in valid:
            listed = f"valid: {', '.join(valid)}" if valid else "it takes none"
            raise ConfigError(f"stage {name} has no option {option!r}", f"{did_you_mean(option, valid)}{listed}")
    for each in parameters:
        if each.name in valid and each.default is each.empty and each.name not in given:
            raise ConfigError(f"stage {name} needs `{each.name}`", f"give it under stages.{name}; see docs/stages.md")


class _Checked:
    """A stage whose columns are what it has declared, of the right length, and finite."""

    def __init__(self, name: str, gives: tuple[str, ...], stage: Stage) -> None:
        self._name = name
        self._gives = gives
        self._stage = stage

    def columns(self, data: Databuffer) -> Mapping[str, Column]:
        made = {name: np.ascontiguousarray(column, "<f4") for name, column in self._stage.columns(data).items()}
        if set(made) != set(self._gives):
            raise ConfigError(
                f"stage {self._name} made {', '.join(made) or 'nothing'}, and declares {', '.join(self._gives)}",
                "return a dict with exactly what `gives` names",
            )
        data.adding(made)  # refuses another length
        for name, column in made.items():
            if not np.isfinite(column).all():
                raise ConfigError(
                    f"stage {self._name} made {name} with a value that is not finite", "look at its model"
                )
        return made


# ---------------------------------------------------------------- the worker of a stage

WAIT = 20.0  # seconds that one call waits for groups
_PAUSE = 0.5
_MAY_PASS = (Unavailable, DeadlineExceeded, StorageError)


class StageWorker:
    """A worker of one stage. It gives up after `patience` seconds without an answer of the run's service, because a
    worker that joined by URL has no supervisor. It writes its timeline to `spans`."""

    def __init__(
        self,
        recipe: Recipe,
        policy: str,
        name: str,
        stage: Stage,
        *,
        dataflow_url: str,
        token: str,
        patience: float | None = None,
        clock: Clock | None = None,
        spans: Spans | None = None,
    ) -> None:
        settings = recipe.policies[policy]
        self._policy = policy
        self._name = name
        self._stage = stage
        self._groups = settings.stages[name].groups
        self._columns = columns_of(settings.trainer)
        self._patience = patience
        self._clock = clock or SystemClock()
        self._heard = self._clock.monotonic()
        self._spans = spans or NoSpans()
        self._dataflow = connect(dataflow_url, token)
        self._reader = PayloadReader(self._dataflow.units, token)
        self._writer = UnitWriter(self._dataflow.units, token, segment_bytes=recipe.dataflow.units.segment_bytes)
        self._thread = ThreadPoolExecutor(1, f"stage-{name}")  # torch keeps what it has set up by thread

    async def run(self) -> None:
        """Handle groups until the run has ended."""
        attempt = uuid.uuid4().hex
        while True:
            try:
                reply = await self._dataflow.lease_stage(self._ask(attempt))
                self._heard = self._clock.monotonic()
                if reply.phase == "ended":
                    return
                if reply.batch is None and reply.phase != "training":
                    await asyncio.sleep(_PAUSE)  # a trainer that restarts may still roll back
                if reply.batch is not None and await self._handle(reply.batch):
                    attempt = uuid.uuid4().hex
            except LeaseLost as error:
                log.warning("stage %s: %s", self._name, error.message)
                attempt = uuid.uuid4().hex
            except _MAY_PASS as error:
                self._check_patience(error)
                await asyncio.sleep(_PAUSE)  # then again under the same attempt, which keeps its groups

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._reader.close()
        await self._writer.close()
        await self._dataflow.close()

    def _ask(self, attempt: str) -> LeaseStage:
        return LeaseStage(policy=self._policy, stage=self._name, attempt=attempt, groups=self._groups, wait=WAIT)

    def _check_patience(self, error: Exception) -> None:
        log.warning("stage %s: %s", self._name, error)
        if self._patience is not None and self._clock.monotonic() - self._heard > self._patience:
            raise RunError(
                f"the run's service has not answered for {self._patience:.0f} s", "is the run over, or its host gone?"
            ) from error

    # ------------------------------------------------------------ one lease

    async def _handle(self, batch: Batch) -> bool:
        """Return whether the lease is finished. Unreadable rows are reported, and their episodes played again; the
        attempt then holds the remaining groups."""
        try:
            async with self._renewed(batch):
                columns = await self._made(batch) if batch.samples else []
        except DamagedRows as error:
            await self._dataflow.lose_rows(LoseRows(rows=list(error.rows), reason=error.message))
            return False
        news = CommitStage(
            policy=self._policy, stage=self._name, batch=batch.id, attempt=batch.attempt, columns=columns
        )
        ack = await self._dataflow.commit_stage(news)
        if not ack.accepted:
            log.warning("stage %s: batch %s was not taken: %s", self._name, batch.id, ack.reason)
        return True

    async def _made(self, batch: Batch) -> list[SampleColumns]:
        payload = await self._reader.read_samples([[sample.row] for sample in batch.samples], self._columns)
        data = Databuffer(make_rows(batch.samples, payload, batch.policy, batch.version))
        rows = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, data)
        places: Sequence[Row] = await self._writer.put(rows)
        return [SampleColumns(sample=sample.id, row=row) for sample, row in zip(batch.samples, places, strict=True)]

    def _compute(self, data: Databuffer) -> list[Arrays]:
        """Return the columns of each sample, as a storage unit takes them."""
        with self._spans.doing("infer"):
            made = self._stage.columns(data)
        rows: list[Arrays] = [{} for _ in range(len(data))]
        for name, column in made.items():
            parts = np.split(column, data.rows.start_R[1:] if name.endswith("_N") else range(1, len(data)))
            for row, part in zip(rows, parts, strict=True):
                row[payload_name(name)] = part
        return rows

    @asynccontextmanager
    async def _renewed(self, batch: Batch) -> AsyncIterator[None]:
        renewing = asyncio.create_task(Renewal(self._dataflow.renew_batch, batch).run(), name=f"renew-{batch.id}")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})


async def run_stage(
    recipe: Recipe,
    policy: str,
    name: str,
    *,
    dataflow_url: str,
    token: str,
    patience: float | None = None,
    spans: Spans | None = None,
) -> None:
    """Work for the stage `name` of `policy` until the run has ended. `token` is the stage's, `spans` its timeline."""
    startup.doing("loading the model")
    stage = await asyncio.to_thread(build_stage, recipe, policy, name)
    worker = StageWorker(
        recipe, policy, name, stage, dataflow_url=dataflow_url, token=token, patience=patience, spans=spans
    )
    startup.ready()
    log.info("works for stage %s of %s", name, policy)
    try:
        await worker.run()
    finally:
        await worker.close()
