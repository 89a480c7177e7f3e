"""The rollout node: lease tasks, play many episodes at once, push what they leave, follow the weights.

Invariants: at most `episodes` episodes run at once; an episode whose lease is lost is cancelled and pushes nothing;
a trajectory's payload is durable in a storage unit before its task is completed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import openai

from rillflow.clients.dataflow import DataflowClient
from rillflow.clients.units import UnitWriter
from rillflow.config import Recipe
from rillflow.contracts import Clock, Engine, SystemClock
from rillflow.errors import RillflowError
from rillflow.gateway.record import Sample, SessionRecord
from rillflow.gateway.server import Gateway
from rillflow.rollout.episode import EpisodeFailed, Reward, RunningEpisode, Workflow, play, score, short
from rillflow.rollout.refresh import Refresher
from rillflow.rollout.rewards import require_all
from rillflow.types import CompleteTask, FailTask, Heartbeat, LeaseTasks, Row, SampleMeta, TaskLease

if TYPE_CHECKING:
    from rillflow.contracts import Buffer

log = logging.getLogger(__name__)

LEASE_WAIT = 2.0
PULL_WAIT = 0.2  # between two questions while weights are being pulled
HEARTBEAT_EVERY = 2.0
PUSH_DEADLINE = 120.0


class Node:
    """One node: its gateway and engines are handed in, started."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        *,
        dataflow: DataflowClient,
        writer: UnitWriter,
        gateway: Gateway,
        gateway_url: str,
        engines: Mapping[str, Engine],
        refreshers: Mapping[str, Refresher],
        workflow: Workflow,
        reward: Reward | None,
        client: openai.AsyncOpenAI,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._incarnation = uuid.uuid4().hex
        self._recipe = recipe
        self._dataflow = dataflow
        self._writer = writer
        self._gateway = gateway
        self._gateway_url = gateway_url
        self._engines = engines
        self._refreshers = refreshers
        self._workflow = workflow
        self._reward = reward
        self._client = client
        self._clock = clock or SystemClock()
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._finished = 0
        self._ended = False

    async def run(self) -> None:
        """Until the run has ended; running episodes are cancelled then, because nobody waits for them."""
        helpers = [asyncio.create_task(self._heartbeats(), name="heartbeats")]
        for policy, refresher in self._refreshers.items():
            follow = refresher.run(self._recipe.rollout.refresh_every)
            helpers.append(asyncio.create_task(follow, name=f"refresh-{policy}"))
        try:
            while await self._lease_once():
                for helper in helpers:
                    if helper.done():
                        helper.result()
        finally:
            tasks = [*helpers, *self._pulls.values(), *self._playing.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ leasing

    async def _lease_once(self) -> bool:
        """Lease and start what there is room for; False once the run has ended."""
        room = self._recipe.rollout.episodes - len(self._playing)
        if room <= 0:
            self._freed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), HEARTBEAT_EVERY)
            return not self._ended
        wanted = LeaseTasks(
            node=self.name,
            incarnation=self._incarnation,
            want=room,
            versions=self._versions(),
            # The answer may be another as soon as a pull has ended: no long question meanwhile.
            wait=0.0 if self._pulls else LEASE_WAIT,
        )
        try:
            reply = await self._dataflow.lease_tasks(wanted)
        except RillflowError as error:
            if error.status < 500:  # our own mistake (the token, the request): asking again would not mend it
                raise
            log.warning("no tasks: %s", error)
            await asyncio.sleep(LEASE_WAIT)
            return True
        if reply.phase == "ended":
            return False
        for lease in reply.leases:
            self._playing[lease.attempt] = asyncio.create_task(self._play(lease), name=lease.task.id)
        await self._catch_up(reply.heads, wait=not reply.leases)
        return True

    async def _catch_up(self, heads: Mapping[str, int], *, wait: bool) -> None:
        """Pull what is behind, each policy in a task of its own, so that a slow one delays nobody.

        `wait` a moment, or until the first of them is there, before the next question.
        """
        for policy, engine in self._engines.items():
            if heads.get(policy, engine.version) != engine.version and policy not in self._pulls:
                self._pulls[policy] = asyncio.create_task(self._pull(policy), name=f"pull-{policy}")
        if wait and self._pulls:
            await asyncio.wait(self._pulls.values(), timeout=PULL_WAIT, return_when=asyncio.FIRST_COMPLETED)

    async def _pull(self, policy: str) -> None:
        try:
            await self._refreshers[policy].refresh()
        finally:
            del self._pulls[policy]

    def _versions(self) -> dict[str, int]:
        return {policy: engine.version for policy, engine in self._engines.items()}

    async def _heartbeats(self) -> None:
        """Renew the leases; stop playing what was taken away."""
        while True:
            beat = Heartbeat(
                node=self.name,
                incarnation=self._incarnation,
                attempts=list(self._playing),
                versions=self._versions(),
                capacity=self._recipe.rollout.episodes,
                stats=self._stats(),
            )
            try:
                reply = await self._dataflow.heartbeat(beat, HEARTBEAT_EVERY * 4)
            except RillflowError as error:
                log.warning("heartbeat not taken: %s", error)
            else:
                self._ended = reply.phase == "ended"
                for attempt in reply.lost:
                    if attempt in self._playing:
                        self._playing[attempt].cancel()
            await asyncio.sleep(HEARTBEAT_EVERY)

    def _stats(self) -> dict[str, float]:
        stats: dict[str, float] = {"episodes_finished": self._finished, "episodes_running": len(self._playing)}
        for policy, engine in self._engines.items():
            now = engine.stats()
            stats |= {
                f"{policy}.generated_tokens": now.generated_tokens,
                f"{policy}.prefilled_tokens": now.prefilled_tokens,
                f"{policy}.reused_tokens": now.reused_tokens,
                f"{policy}.loads": self._refreshers[policy].loads,
                f"{policy}.load_seconds": self._refreshers[policy].seconds,
            }
        return stats

    # ------------------------------------------------------------ playing

    async def _play(self, lease: TaskLease) -> None:
        try:
            await self._play_and_push(lease)
        except RillflowError as error:
            # The lease runs out by itself and the task is played again, here or elsewhere.
            log.warning("task %s: its end could not be told: %s", lease.task.id, error)
        finally:
            self._playing.pop(lease.attempt, None)
            self._freed.set()

    async def _play_and_push(self, lease: TaskLease) -> None:
        task = lease.task
        started = self._clock.monotonic()
        limits = self._recipe.rollout
        session = self._gateway.sessions.open(
            lease.attempt, seed=task.seed, group=task.group, deadline_seconds=limits.episode_timeout
        )
        try:
            episode = RunningEpisode(
                task,
                client=self._client,
                policies=list(self._engines),
                base_url=f"{self._gateway_url}/s/{lease.attempt}/v1",
                api_key=session,
                clock=self._clock,
                seconds=limits.episode_timeout,
            )
            answer = await play(self._workflow, episode)
            rewards = await score(self._reward, task.prompt.payload, answer, limits.reward_timeout, episode.policies)
        except EpisodeFailed as failure:
            await self._fail(lease, failure)
            return
        finally:
            record = self._gateway.sessions.close(lease.attempt)
        if record.calls == 0:
            await self._fail(lease, EpisodeFailed("no_model_call", "the workflow called no model"))
            return
        await self._push(lease, record, rewards, self._clock.monotonic() - started)

    async def _push(
        self, lease: TaskLease, record: SessionRecord, rewards: Mapping[str, float], seconds: float
    ) -> None:
        samples, payloads = pack(record, list(self._engines))
        try:
            require_all(rewards, {sample.policy for sample in samples}, answer_is_reward=self._reward is None)
        except RillflowError as error:
            await self._fail(lease, EpisodeFailed("reward_error", short(error)))
            return
        rows = await self._writer.put(payloads, PUSH_DEADLINE)
        done = CompleteTask(
            task=lease.task.id,
            attempt=lease.attempt,
            node=self.name,
            reward=next(iter(rewards.values())),
            samples=[describe(sample, row, rewards[sample.policy]) for sample, row in zip(samples, rows, strict=True)],
            calls=record.calls,
            seconds=seconds,
        )
        ack = await self._dataflow.complete(done, PUSH_DEADLINE)
        self._finished += ack.accepted
        if not ack.accepted:
            log.info("task %s: completion not taken: %s", lease.task.id, ack.reason)

    async def _fail(self, lease: TaskLease, failure: EpisodeFailed) -> None:
        log.warning("task %s failed: %s", lease.task.id, failure)
        news = FailTask(
            task=lease.task.id, attempt=lease.attempt, node=self.name, cause=failure.cause, error=failure.error
        )
        await self._dataflow.fail(news, PUSH_DEADLINE)


def pack(record: SessionRecord, policies: Sequence[str]) -> tuple[list[Sample], list[dict[str, Buffer]]]:
    """The samples of a trajectory and, in the same order, their payload rows."""
    samples = [sample for policy in policies for sample in record.samples(policy)]
    payloads: list[dict[str, Buffer]] = [dict(sample.columns) for sample in samples]
    if payloads:
        payloads[0]["transcript"] = json.dumps(record.transcript()).encode()
    return samples, payloads


def describe(sample: Sample, row: Row, reward: float) -> SampleMeta:
    """What the ledger is told of a sample."""
    return SampleMeta(
        policy=sample.policy,
        row=row,
        tokens=sample.tokens,
        trained=sample.trained,
        oldest=sample.oldest,
        newest=sample.newest,
        reward=reward,
        truncated=sample.truncated,
    )
