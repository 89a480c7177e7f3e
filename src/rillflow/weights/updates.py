"""Which engines update their weights when, which versions must stay in the store, and what a joining process must know.

Invariants: at most half of a policy's engines update at once, so the policy is always sampled; a version that an engine
serves or downloads is listed as in use. All state is in memory, because every engine repeats its reports within
seconds: the entries of a dead engine expire, and an engine that gets no answer goes ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rillflow import __version__
from rillflow.config import Recipe
from rillflow.config.secrets import masked
from rillflow.contracts import Clock, SystemClock
from rillflow.errors import BadRequest, StorageError
from rillflow.storage import read_json, write_json
from rillflow.types import Ack, AskTurn, EngineInfo, Engines, LookEngines, RunRecipe, TellFetch, TurnReply, WeightsKey
from rillflow.types.routes import Updates
from rillflow.types.runs import process_of
from rillflow.wire import Service
from rillflow.wire.blocking import News
from rillflow.wire.tokens import Keyring


class Invitation:
    """The answer to a process that joins a run without its folder: the recipe, and where weights are served now.

    It holds no secrets: passwords are removed from URLs, and keys, variables and headers with secret names are masked
    (`config.secrets`). A process that joins takes the variables from its own environment. It gets digests of
    the run's tokens only.
    """

    def __init__(self, recipe: Recipe, folder: Path, keyring: Keyring) -> None:
        self._recipe = masked(recipe.model_dump(mode="json"))
        self._folder = folder
        self._keyring = keyring

    def answer(self) -> RunRecipe:
        return RunRecipe(
            recipe=self._recipe,
            version=__version__,
            weights=self._url("weights"),
            folder=str(self._folder.resolve()),
            digests=self._keyring.digests,
            trainers={policy: url for policy in self._recipe["policies"] if (url := self._url(f"weights-{policy}"))},
            ledgers=self._ledgers(),
        )

    def _ledgers(self) -> list[str]:
        count = self._recipe["dataflow"]["ledgers"]
        urls = [self._url(process_of(number)) for number in range(count)] if count > 1 else []
        return urls if all(urls) else []

    def serves(self, policy: str, url: str) -> None:
        """Record where the trainer of `policy` serves its weights; empty: they are in the run's folder."""
        path = self._path(f"weights-{policy}")
        if url:
            write_json(path, {"url": url})
        else:
            path.unlink(missing_ok=True)

    def _path(self, process: str) -> Path:
        return self._folder / "endpoints" / f"{process}.json"

    def _url(self, process: str) -> str:
        """Read a process's URL. It changes when a weight server is started again, perhaps on another host."""
        path = self._path(process)
        try:
            return str(read_json(path)["url"]) if path.is_file() else ""
        except (StorageError, KeyError, TypeError):
            return ""


# ---------------------------------------------------------------- updates


SILENT_SECONDS = 5.0  # after which an engine that sends no beat is left out
TURN_SECONDS = 5.0  # until a turn expires; an engine that needs longer asks again
FETCH_SECONDS = 15.0  # until an announced download expires; an engine that needs longer announces it again
LONGEST_POLL = 60.0
_NEWS_PAUSE = 0.002
_MOST = 4096  # engines, and downloads
_SHOWN = 300  # characters of what is wrong with an engine's weights


class EngineRoster:
    """The engine processes that sent a beat within `SILENT_SECONDS`."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._heard: dict[str, tuple[float, EngineInfo]] = {}
        self._notable: dict[str, tuple[str, dict[str, int], str]] = {}
        self._news = 0

    def forget(self, name: str) -> None:
        """Drop an engine that knows that the run has ended."""
        self._heard.pop(name, None)

    def hear(self, info: EngineInfo) -> Engines:
        """Take a beat; return all engines."""
        if not 0 < len(info.name) <= 200 or not info.url.startswith("http://") or len(info.url) > 300:
            raise BadRequest("an engine tells its name and where it listens", "a name of 1 to 200 characters and a URL")
        engines = self.engines()
        if info.name not in self._heard and len(self._heard) >= _MOST:
            raise BadRequest(f"the run has {_MOST} engines already", "does each start of an engine have a new name?")
        self._heard[info.name] = (self._clock.monotonic(), info)
        others = [one for one in engines.engines if one.name != info.name]
        return Engines(engines=[*others, info], news=self._look())

    def engines(self) -> Engines:
        since = self._clock.monotonic() - SILENT_SECONDS
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= since}
        return Engines(engines=[info for _, info in self._heard.values()], news=self._look())

    def _look(self) -> int:
        """Return the number of the last change that readers wait for. Changes of an engine's load do not count."""
        notable = {name: (info.url, info.versions, info.paused) for name, (_, info) in self._heard.items()}
        self._news += notable != self._notable
        self._notable = notable
        return self._news

    def serving(self, policy: str) -> list[int]:
        """Return the version that each engine serves of a policy."""
        return [info.versions[policy] for info in self.engines().engines if policy in info.versions]


class Turns:
    """Which engines update their weights now."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._until: dict[str, dict[str, float]] = {}

    def ask(self, policy: str, engine: str, engines: int) -> bool:
        """Return whether `engine`, one of `engines` that serve the policy, may update now: at most half of them may at
        once, rounded up. Asking again renews the turn."""
        if not 0 < len(engine) <= 200:
            raise BadRequest("an engine's name has 1 to 200 characters", "give every engine a short name of its own")
        now = self._clock.monotonic()
        turns = {name: until for name, until in self._until.get(policy, {}).items() if until > now}
        granted = engine in turns or len(turns) < max(1, (engines + 1) // 2)
        if granted:
            turns[engine] = now + TURN_SECONDS
        self._until[policy] = turns
        return granted

    def done(self, policy: str, engine: str) -> None:
        self._until.get(policy, {}).pop(engine, None)


class Fetches:
    """The versions that engines download before they serve anything."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._until: dict[tuple[str, str], tuple[float, int]] = {}

    def tell(self, news: TellFetch) -> None:
        if not 0 < len(news.engine) <= 200 or news.version < 0:
            raise BadRequest(
                "an engine tells its name and the version that it fetches", "1 to 200 characters; 0 or more"
            )
        key = (news.policy, news.engine)
        self._drop_expired()
        if key not in self._until and len(self._until) >= _MOST:
            raise BadRequest(f"{_MOST} engines are fetching already", "does each start of an engine have a new name?")
        self._until[key] = (self._clock.monotonic() + FETCH_SECONDS, news.version)

    def versions(self, policy: str) -> list[int]:
        self._drop_expired()
        return [version for (of, _), (_, version) in self._until.items() if of == policy]

    def _drop_expired(self) -> None:
        now = self._clock.monotonic()
        self._until = {key: told for key, told in self._until.items() if told[0] > now}


@dataclass(frozen=True)
class RunFacts:
    """Facts of the ledger that updates depend on.

    `serving` returns the versions that nodes with their own engines serve of a policy, `wanted` those that evaluations
    want kept.
    """

    policies: Sequence[str]
    serving: Callable[[str], list[int]]
    wanted: Callable[[str], list[int]]
    ended: Callable[[], bool]


class WeightUpdates:
    """Answers the routes of `Updates` on the service of another part. Trainers sign weights with `key`."""

    def __init__(
        self, facts: RunFacts, invitation: Invitation | None = None, clock: Clock | None = None, *, key: bytes = b""
    ) -> None:
        self._facts = facts
        self._key = key
        self.invitation = invitation
        self._clock = clock or SystemClock()
        self._roster = EngineRoster(clock)
        self._turns = Turns(clock)
        self._fetches = Fetches(clock)
        self._turn_news, self._engine_news = News(_NEWS_PAUSE), News(_NEWS_PAUSE)
        self._waiting: dict[int, AskTurn] = {}

    def mount(self, service: Service) -> None:
        service.on(Updates.recipe, self._recipe)
        service.on(Updates.engine_beat, self._engine_beat)
        service.on(Updates.engines, self._engines)
        service.on(Updates.turn, self._turn)
        service.on(Updates.fetching, self._fetching)
        service.on(Updates.weights_key, self._weights_key)
        service.on(Updates.versions_in_use, self._versions_in_use)
        service.on(Updates.versions_wanted, self._versions_wanted)

    def waits(self) -> Iterator[str]:
        """Yield what engines wait for, as the run's status shows it."""
        for engine in self._roster.engines().engines:
            if engine.trouble:
                yield f"engine {engine.name}: {engine.trouble[:_SHOWN]}"
        for ask in list(self._waiting.values()):
            yield f"{ask.engine} waits to update the weights of {ask.policy}: other engines update now"

    async def _recipe(self) -> RunRecipe:
        if self.invitation is None:
            raise BadRequest("this service has no recipe", "start it with `rillflow dataflow RUN`")
        return self.invitation.answer()

    async def _weights_key(self) -> WeightsKey:
        return WeightsKey(key=self._key)

    async def _engine_beat(self, info: EngineInfo) -> Engines:
        before = self._roster.engines().news
        known = self._roster.hear(info)
        if known.news != before:
            self._engine_news.tell()
        if not self._facts.ended():
            return known
        self._roster.forget(info.name)
        return msgspec.structs.replace(known, ended=True)

    async def _engines(self, ask: LookEngines) -> Engines:
        end = self._clock.monotonic() + min(ask.wait, LONGEST_POLL)
        while (known := self._roster.engines()).news == ask.news and (left := end - self._clock.monotonic()) > 0:
            await self._engine_news.wait(left)
        return known

    async def _turn(self, ask: AskTurn) -> TurnReply:
        self._check(ask.policy)
        if ask.done:
            self._turns.done(ask.policy, ask.engine)
            self._turn_news.tell()
            return TurnReply(granted=False)
        end = self._clock.monotonic() + (min(ask.wait, LONGEST_POLL) if ask.wait > 0 else 0.0)
        while True:
            granted = self._turns.ask(ask.policy, ask.engine, self._sampling(ask.policy))
            left = end - self._clock.monotonic()
            if granted or left <= 0:
                return TurnReply(granted=granted)
            self._waiting[id(ask)] = ask
            try:
                await self._turn_news.wait(left)
            finally:
                del self._waiting[id(ask)]

    async def _fetching(self, news: TellFetch) -> Ack:
        self._check(news.policy)
        self._fetches.tell(news)
        return Ack(accepted=True)

    async def _versions_in_use(self) -> dict[str, list[int]]:
        """Return the versions that live nodes and engines serve or are downloading."""
        sources = (self._roster.serving, self._facts.serving, self._fetches.versions)
        return {
            policy: sorted({version for source in sources for version in source(policy)})
            for policy in self._facts.policies
        }

    async def _versions_wanted(self) -> dict[str, list[int]]:
        return {policy: self._facts.wanted(policy) for policy in self._facts.policies}

    def _sampling(self, policy: str) -> int:
        """Return the number of engines of a policy: engine processes if the run has any, else its nodes."""
        return len(self._roster.serving(policy) or self._facts.serving(policy))

    def _check(self, policy: str) -> None:
        if policy not in self._facts.policies:
            raise BadRequest(f"unknown policy {policy!r:.80}", f"one of: {', '.join(self._facts.policies)}")
