"""Play one episode of a recipe without a run and report it call by call, for `rillflow try`.

The code of a rollout node plays the episode, with an engine in this process (`try_policy`). Each answer is reported as
soon as it has ended, before the agent sees it, with the messages of the agent and its tools since the call before.
Nothing is stored or trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rillflow.config import Recipe, ResourcesConfig, RuntimeConfig
from rillflow.evaluate.stage import Ended, open_engines, open_stage
from rillflow.gateway.sessions.events import Asked, NoSessionLog
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.trees.messages import Body
from rillflow.gateway.trees.record import Sample, cause, forks
from rillflow.gateway.trees.tree import Node
from rillflow.types import Task

_SLOTS = 8  # sequences at once are enough for one episode, and quickly made room for


@dataclass(frozen=True)
class Turn:
    """One answered model call. `given` are the messages that no earlier call had.

    `fork` says why the call left every earlier path, empty where it continues one; `begins`: it shares no message with
    an earlier call. `prompt` and `sampled` count tokens, None where unknown; `tokens` and `logprobs` are of the
    answer, empty where an endpoint has sampled it.
    """

    policy: str
    agent: str
    given: Sequence[Body]
    answer: Body
    finish: str
    begins: bool = False
    fork: str = ""
    prompt: int | None = None
    sampled: int | None = None
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()


Tell = Callable[[Turn], None]


@dataclass(frozen=True)
class Outcome:
    """What the episode came to. `paths` are as those of `SessionRecord.transcript`, `forks` the reasons of all forks;
    an endpoint leaves no `samples`."""

    ended: Ended
    calls: int
    paths: Sequence[dict[str, Any]]
    forks: Sequence[str]
    samples: Sequence[Sample] = field(default=())


def for_one_episode(recipe: Recipe) -> Recipe:
    """Return the recipe without what concerns a whole run, which may not fit one process."""
    policies = {
        name: policy.model_copy(
            update={"engine": policy.engine.model_copy(update={"slots": min(policy.engine.slots, _SLOTS)})}
        )
        for name, policy in recipe.policies.items()
    }
    runtime = RuntimeConfig(deterministic=recipe.runtime.deterministic)
    return recipe.model_copy(update={"policies": policies, "runtime": runtime, "resources": ResourcesConfig()})


async def try_policy(recipe: Recipe, task: Task, folder: Path, tell: Tell) -> Outcome:
    """Play one episode with the recipe's own models; `folder` is where commands and servers write."""
    recipe = for_one_episode(recipe)
    watcher = Watcher(tell)
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    async with (
        open_engines(recipe, logs) as engines,
        open_stage(recipe, engines, folder, watched=watcher) as stage,
    ):
        ended = await stage.play(task)
    return watcher.outcome(ended)


class Watcher(NoSessionLog):
    """Tells every answer of a session as it ends, and keeps the session to look at."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._session: Session | None = None
        self._seen: set[Node] = set()

    def opened(self, session: Session) -> None:
        self._session = session

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        path, tree = node.path(), session.trees[asked.policy]
        new = [one for one in path if one not in self._seen]
        self._tell(
            Turn(
                policy=asked.policy,
                agent=node.agent,
                given=[message.body for one in new[:-1] for message in one.messages],
                answer=node.messages[-1].body,
                finish=node.finish or "",
                begins=len(new) == len(path),
                fork=next((cause(tree, one) for one in new if one.fork), ""),
                prompt=sum(len(one.tokens) for one in path[:-1]),
                sampled=len(node.tokens),
                tokens=list(node.tokens),
                logprobs=list(node.logprobs),
            )
        )
        self._seen.update(new)

    def outcome(self, ended: Ended) -> Outcome:
        """Return the whole episode; of a failed one, its messages before the failure."""
        if self._session is None:
            return Outcome(ended, 0, [], [])
        record = self._session.record()
        reasons = [cause(tree, fork) for tree in record.trees.values() for fork in forks(tree)]
        samples = [sample for policy in record.trees for sample in record.samples(policy)]
        return Outcome(ended, record.calls, record.transcript(), reasons, samples)
