"""Groups: from admission to their one end. Every move keeps the tally by lane, state and cause exact.

A group is playing until all its tasks have ended. Where the run has a group's reward, it then waits for that reward
(`scoring`). After that each policy that has trained tokens in it gives a share to each stream that trains on that
policy; the group is open as long as one of its shares is, and then has the end of the luckiest.

The only writer of groups, tally and recent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import fmean

from rillflow.contracts import PromptSource
from rillflow.dataflow.hooks.running import Hooks
from rillflow.dataflow.ledger.database import Base, Part
from rillflow.dataflow.ledger.payload import Samples
from rillflow.dataflow.ledger.playing import Playing, PlayingGroup
from rillflow.dataflow.ledger.serving import alike
from rillflow.dataflow.ledger.shares import CompleteGroup, Episode, Key, Shares, episodes_of, statistics_of
from rillflow.dataflow.ledger.states import MACHINES
from rillflow.dataflow.ledger.tables import Group, Share
from rillflow.dataflow.ledger.tasks import Tasks
from rillflow.dataflow.ledger.versions import Lineage
from rillflow.errors import DataError
from rillflow.types import Lane, Prompt
from rillflow.types.base import json_decoder

NO_STREAM, TOO_FEW, POLICY_DONE, GROUP_DEADLINE = "no_stream", "too_few", "policy_done", "group_deadline"
_METRICS = json_decoder(dict[str, float])
_LUCK = ("trained", "expired", "failed", "filtered")
_ENDED = MACHINES["groups"].ends
_OPEN_SHARE = MACHINES["shares"].open


class Groups(Part):
    def __init__(
        self,
        base: Base,
        *,
        hooks: Hooks,
        sources: dict[Lane, PromptSource],
        lineage: Lineage,
        playing: Playing,
        tasks: Tasks,
        samples: Samples,
        shares: Shares,
    ) -> None:
        super().__init__(base)
        self._hooks = hooks
        self._sources = sources
        self._lineage = lineage
        self._playing = playing
        self._tasks = tasks
        self._samples = samples
        self._shares = shares
        self._tallies = self._db.totals("tally", 3)
        self.moves = 0  # since the ledger was opened: a hint that something may follow, not a state

    # ------------------------------------------------------------ counting

    def count(self, lane: Lane, *states: str) -> int:
        sums = self._tallies.sums()
        return sum([n for (of, state, _), n in sums.items() if of == lane and state in states])

    @property
    def outstanding(self) -> int:
        """Train groups that were admitted and have not ended."""
        return self.count("train", "playing", "open")

    def measured(self, which: str, value: str | int) -> dict[str, float]:
        """Return the means of the numbers that were kept with the episodes of some groups, by their names in a line of
        metrics. `which` is the query that names the groups for `value`."""
        query = f"SELECT metrics FROM tasks WHERE grp IN ({which}) AND state = 'done' AND metrics != '{{}}'"
        found: dict[str, list[float]] = {}
        for text in self._db.column(query, (value,)):
            for name, number in _METRICS.decode(text).items():
                found.setdefault(f"episode/{name}", []).append(number)
        return {name: fmean(numbers) for name, numbers in found.items()}

    def _tally(self, lane: str, state: str, cause: str, by: int) -> None:
        self.moves += 1
        self._tallies.add(by, lane, state, cause)

    # ------------------------------------------------------------ admission

    def create(self, lane: Lane, indices: Iterable[int], *, size: int, number: int = 0, step: int = 0) -> None:
        """Admit the prompts at these positions; `number` and `step` are those of their evaluation round."""
        prefix, now = self._rules.mark + ("t" if lane == "train" else f"e{number}."), self._clock.now()
        groups = [
            PlayingGroup(f"{prefix}{index:06d}", lane, number, index, self._sources[lane].at(index).id)
            for index in indices
        ]
        self._db.many(
            "INSERT INTO groups (id, lane, round, ord, prompt, planned, state, admitted_at) "
            "VALUES (?, ?, ?, ?, ?, ?, 'playing', ?)",
            [(group.id, lane, number, group.ord, group.prompt, size, now) for group in groups],
        )
        self._tally(lane, "playing", "", len(groups))
        self._db.count(f"admitted.{lane}", len(groups))
        self._tasks.create(groups, size=size, step=step)

    def prompt(self, lane: Lane, index: int, expected: str) -> Prompt:
        prompt = self._sources[lane].at(index)
        if prompt.id != expected:
            raise DataError(
                f"prompt {index} of the {lane} lane was {expected!r} when it was admitted and is {prompt.id!r} now",
                "restore the prompts that the run was started with",
            )
        return prompt

    def prompts(self, groups: Iterable[str]) -> dict[str, Prompt]:
        """Return the prompts of these groups, which are playing, by the groups' ids."""
        found = map(self._playing.get, groups)
        return {group.id: self.prompt(group.lane, group.ord, group.prompt) for group in found}

    def started(self, groups: Iterable[str]) -> None:
        """Note when a task of each group was leased first."""
        now = self._clock.now()
        self._db.many(
            "UPDATE groups SET started = ? WHERE id = ? AND started IS NULL", [(now, group) for group in groups]
        )

    # ------------------------------------------------------------ settling

    def row(self, group: str) -> Group:
        row = self._db.row(Group, f"SELECT {Group.columns()} FROM groups WHERE id = ?", (group,))
        assert row is not None, group
        return row

    def _move(self, group: Group, state: str, cause: str = "") -> None:
        self._move_all([(group, state, cause)])

    def _move_all(self, moves: Iterable[tuple[Group, str, str]]) -> None:
        """Move groups to other states, each for a cause."""
        now = self._clock.now()
        others = [
            (group, state, cause) for group, state, cause in moves if (group.state, group.cause) != (state, cause)
        ]
        self._db.many(
            "UPDATE groups SET state = ?, cause = ?, ended_at = ?, scoring = 0 WHERE id = ?",
            [(state, cause, now if state in _ENDED else None, group.id) for group, state, cause in others],
        )
        for group, state, cause in others:
            self._tally(group.lane, group.state, group.cause, -1)
            self._tally(group.lane, state, cause, 1)
            if group.state == "playing":
                self._playing.remove(group.id)

    def settle_all(self, groups: Sequence[str]) -> None:
        """Settle the groups of tasks that ended, in the order in which their last ones did."""
        for group in reversed(dict.fromkeys(reversed(groups))):
            self.settle(group)

    def settle(self, group: str, *, scored: bool = False) -> bool:
        """End the group's playing, once all its tasks have ended and, where the run has a group's reward, it is
        `scored`."""
        playing = self._playing.get(group)
        if playing.open:
            return False
        row = _row_of(playing)
        needed = 2 if row.lane == "train" and row.planned > 1 else 1
        if sum(task.state == "done" for task in playing.tasks) < needed:
            self._fail(row)
        elif self._rules.group_reward and not scored:
            self._db.run("UPDATE groups SET scoring = 1 WHERE id = ?", (group,))
            return False
        elif row.lane == "eval":
            self._move(row, "evaluated")
        else:
            self._move(row, *_end_of(self._share_out(row, playing, needed)))
        return True

    def _fail(self, row: Group) -> None:
        cause = self._db.value(
            "SELECT cause FROM tasks WHERE grp = ? AND state IN ('failed', 'cancelled') "
            "ORDER BY state DESC, place DESC LIMIT 1",
            (row.id,),
        )
        self._samples.release(row.id)
        self._move(row, "failed", str(cause))

    def close(self, *groups: str) -> None:
        """Move the groups to the states that their shares ask for."""
        named = list(dict.fromkeys(groups))
        query = f"SELECT {Group.columns('g')} FROM json_each(?) j JOIN groups g ON g.id = j.value"
        rows, shares = self._db.rows(Group, query, (json.dumps(named),)), self._shares.ends(named)
        self._move_all((row, *_end_of(shares.get(row.id, []))) for row in rows)

    # ------------------------------------------------------------ shares

    def _share_out(self, row: Group, playing: PlayingGroup, needed: int) -> list[tuple[str, str]]:
        """Take each producer's statistics, let the filters judge it, and give the streams their shares; returns the
        states and causes of all shares of the group."""
        episodes = episodes_of(self._db, row.id)
        for producer in [name for name, found in episodes.items() if not all(episode.live for episode in found)]:
            del episodes[producer]  # some of its rows were released, when no stream wanted them
            self._samples.release(row.id, producer)
        prompt = self.prompt(row.lane, row.ord, row.prompt)
        shares = {share.key: (share.state, share.cause) for share in self._shares.of(row.id)} if playing.shared else {}
        for producer in self._rules.policies:
            if producer in episodes:
                self._share(row, producer, episodes=episodes[producer], prompt=prompt, needed=needed, shares=shares)
        self._remember(row.id, episodes)
        return [shares[key] for key in sorted(shares)]

    def _share(
        self,
        row: Group,
        producer: str,
        *,
        episodes: Sequence[Episode],
        prompt: Prompt,
        needed: int,
        shares: dict[Key, tuple[str, str]],
    ) -> None:
        """Give a producer's part to its streams: the shares are added to those that the group has. The rows are kept if
        one of them is ready."""
        statistics = statistics_of(episodes)
        grouping = self._rules.grouping
        view = CompleteGroup(
            id=row.id,
            prompt=prompt,
            policy=producer,
            rewards=[episode.reward for episode in episodes],
            lengths=[episode.trained for episode in episodes],
            truncated=[bool(episode.truncated) for episode in episodes],
            staleness=max(0, self._lineage.head(producer) - statistics.oldest),
            alike=() if grouping == "policy" else list(alike(self._db, row.id, producer, grouping).values()),
        )
        if producer == self._rules.policy:
            self._hooks.observe(view)
        held = False
        state, cause = self._hooks.verdict(view) if len(episodes) >= needed else ("filtered", TOO_FEW)
        for stream in self._rules.streams_of(producer):
            key = (row.id, producer, stream)
            if key in shares:
                continue  # it ended before some tasks of the group had to be played again
            over = state == "ready" and self._lineage.done(stream)
            shares[key] = end = ("expired", POLICY_DONE) if over else (state, cause)
            self._shares.create(key, row.ord, *end, statistics)
            held = held or end[0] == "ready"
        if not held:
            self._samples.release(row.id, producer)

    def _remember(self, group: str, episodes: dict[str, list[Episode]]) -> None:
        """Keep what each stream's next step says of the group: of its own policy's part in it, if it has one."""
        for stream in self._lineage.unfinished():
            for producer in (stream, *self._rules.policies[stream].producers):
                if producer in episodes:
                    rewards = [episode.reward for episode in episodes[producer]]
                    flat = len(rewards) > 1 and min(rewards) == max(rewards)
                    values = (stream, group, fmean(rewards), flat, len(rewards), self._clock.now())
                    self._db.run("INSERT OR REPLACE INTO recent VALUES (?, ?, ?, ?, ?, ?)", values)
                    break

    def take_recent(self, stream: str, batch: str) -> tuple[float, float]:
        """Return the mean reward, and the share without variance, of the groups that became complete since the last
        step. If none did (a batch served again after a rollback), return those of the batch's own groups."""
        row = self._db.one("SELECT avg(reward), avg(flat) FROM recent WHERE stream = ?", (stream,))
        if row[0] is None:
            row = self._db.one(
                "SELECT avg(h.mean), 0.0 FROM members m JOIN shares h ON h.grp = m.grp AND h.producer = m.producer "
                "AND h.stream = ? WHERE m.batch = ?",
                (stream, batch),
            )
        self._db.run("DELETE FROM recent WHERE stream = ?", (stream,))
        return row[0], row[1]

    # ------------------------------------------------------------ ending early

    def end(self, group: str, state: str, cause: str) -> None:
        """End a group that is playing before its turn; tasks that are not done are cancelled."""
        self._tasks.cancel(group, cause)
        self._samples.release(group)
        self._move(self.row(group), state, cause)

    def close_late(self) -> None:
        """Let groups that took too long since their first lease go on with the episodes that are done."""
        if self._rules.group_deadline is None:
            return
        for group in self._db.column(
            "SELECT id FROM groups WHERE lane = 'train' AND state = 'playing' AND scoring = 0 AND started < ? "
            "ORDER BY ord",
            (self._clock.now() - self._rules.group_deadline,),
        ):
            self._tasks.cancel(group, GROUP_DEADLINE)
            self._db.count(f"cancelled.{GROUP_DEADLINE}")
            self.settle(group)

    def grace(self) -> None:
        """Give groups that are playing their full time again."""
        self._db.run(
            "UPDATE groups SET started = ? WHERE lane = 'train' AND state = 'playing' AND started IS NOT NULL",
            (self._clock.now(),),
        )

    # ------------------------------------------------------------ playing again

    def rerun(self, group: str, places: Iterable[int], cause: str) -> int:
        """Play the done tasks at these places again; returns how many there were.

        Their samples are deleted, and so are shares that are ready; those that ended stay as they are. Only for groups
        of which no share is leased or trained.
        """
        number = sum([self._tasks.play_again(group, place, cause) for place in places])
        if number:
            self._db.count(f"rerun.{cause}", number)
            self._reopen(group)
        return number

    def rerun_sampled(self, group: str, producer: str, low: int, high: int, cause: str) -> int:
        """Play those tasks again in which `producer` may have trained tokens of versions v with low < v <= high."""
        places = self._db.column(
            "SELECT DISTINCT place FROM samples WHERE grp = ? AND policy = ? AND trained > 0 AND newest > ? "
            "AND oldest <= ? ORDER BY place",
            (group, producer, low, high),
        )
        return self.rerun(group, places, cause)

    def rerun_dead(self, producer: str, low: int, high: int) -> int:
        """Play such tasks again in every group, after these versions were orphaned. Groups that cannot be played again
        expire."""
        rerun = 0
        for group in self._with_versions(producer, low, high):
            if self._shares.untouched(group):
                rerun += self.rerun_sampled(group, producer, low, high, "rolled_back")
            else:
                self.expire_ready(group, producer, "rolled_back")
        return rerun

    def _with_versions(self, producer: str, low: int, high: int) -> list[str]:
        """Return the groups that are playing, or have a share that is ready, with tokens of these versions."""
        found = {(group.ord, group.id) for group in self._playing.sampled(producer, low, high)}
        for stream in self._rules.streams_of(producer):
            rows = self._db.all(
                "SELECT ord, grp FROM shares WHERE stream = ? AND state = 'ready' AND producer = ? "
                "AND newest > ? AND oldest <= ?",
                (stream, producer, low, high),
            )
            found |= {(order, group) for order, group in rows}
        evaluated = self._db.all(
            "SELECT DISTINCT g.id, g.round, g.ord FROM groups g JOIN samples s ON s.grp = g.id WHERE g.lane = 'eval' "
            "AND g.state = 'playing' AND s.policy = ? AND s.trained > 0 AND s.newest > ? AND s.oldest <= ? "
            "ORDER BY g.round, g.ord",
            (producer, low, high),
        )
        return [group for _, group in sorted(found)] + [row[0] for row in evaluated]

    def expire_ready(self, group: str, producer: str, cause: str) -> None:
        """Expire the producer's shares that no stream has taken yet."""
        for share in self._shares.of(group):
            if share.producer == producer and share.state == "ready":
                self._shares.end(share, "expired", cause)
        self.close(group)

    def expire(self, share: Share, cause: str) -> None:
        """Expire a share that is ready."""
        self._shares.end(share, "expired", cause)
        self.close(share.grp)

    def _reopen(self, group: str) -> None:
        for share in self._shares.of(group):
            if share.state == "ready":
                self._shares.remove(share)
        self._move(self.row(group), "playing")
        self._db.run("UPDATE groups SET started = NULL, scoring = 0 WHERE id = ?", (group,))
        self._playing.reload(group)


def _row_of(playing: PlayingGroup) -> Group:
    """Return the row of a group that is playing."""
    return Group(
        playing.id, playing.lane, playing.round, playing.ord, playing.prompt, len(playing.tasks), "playing", "", 0
    )


def _end_of(shares: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return the state and the cause of a group whose shares are in these states for these causes."""
    if any(state in _OPEN_SHARE for state, _ in shares):
        return "open", ""
    if not shares:
        return "filtered", NO_STREAM
    return min(shares, key=lambda share: _LUCK.index(share[0]))
