"""A run of Rillflow as a discrete-event simulation: who waits for whom, on given costs.

Modelled as it is: nodes ask for as many tasks as they have free slots, one question at a time, and wait at the ledger
when there are none; admission by the window of (staleness + 1) batches; a node that is behind gets fewer tasks; the
batch with the earliest deadlines first; what is beyond the bound expires; each rank leases and reads its own part; a
version is published beside training and pulled through relays; completions of one node that come while two are under
way travel together. An episode is a few events, not one for every token: an engine's sequences share its time.

Simplified: a task is any node's; the ledger looks at its state when a question comes, not when it is its turn; all
nodes are equal; nothing fails.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterable

from bench.scale_costs import Costs
from bench.scale_queues import Clock, Engine, Server
from bench.scale_state import Episode, Group, Node, Outcome
from bench.scale_world import NETWORK, ROUND_TRIP, TOKEN_BYTES, World
from rillflow.dataflow.balance import Step, decide, wait_fraction

TICK = 0.02  # seconds of heartbeats and polls that are handed to the ledger together
LEASE_WAIT = 2.0  # of a node's question
NEWS_PAUSE = 0.002  # of the ledger before it wakes who waits
UNDER_WAY, TOGETHER = 2, 256  # completions of a node: calls at once, and in one call


class Simulation:
    def __init__(self, world: World, costs: Costs, seed: int = 0) -> None:
        self.world, self.costs, self.clock = world, costs, Clock()
        self._random = random.Random(seed)
        size = world.nodes
        ledger = costs.ledger
        self._cost = {
            name: getattr(ledger, name).at(size)
            for name in (
                *("lease_call", "lease_each", "nothing", "complete_call", "complete_each", "beat_call", "beat_each"),
                *("open", "peek", "rank", "commit", "idle"),
            )
        }
        device = world.device
        steps = [device.step + number / world.engines * device.sequence for number in range(world.capacity + 1)]
        self.ledger = Server()
        self.units = [self.ledger] if world.central else [Server() for _ in range(world.units)]
        self.disks = [Server() for _ in range(world.units)]
        self.weights, self.relays = Server(), [Server() for _ in range(world.relays)]
        self.nodes = [Node(number, Engine(steps), Server()) for number in range(world.nodes)]
        self._pending: deque[Group] = deque()  # a group once for each task
        self._ready: list[tuple[int, int, Group]] = []
        self._started: set[Group] = set()  # playing, with an episode that has ended
        self._waiting: deque[Node] = deque()
        self._told = self._looking = False
        self._outstanding = self._number = 0
        self._trainer_free = 0.0  # when it began to wait
        self._training = False
        self._goal = 0
        self.version = self._published = 0
        self.steps: list[Step] = []
        self._stale: list[int] = []
        self._latency: dict[str, list[float]] = {}
        self._train_busy = 0.0
        self.trained = self.expired = self._playing = 0

    # ------------------------------------------------------------ running

    def run(self, steps: int, warm: int, most_seconds: float = math.inf) -> Outcome:
        """`steps` that count after `warm` ones that do not; all there were, where these took `most_seconds`."""
        self._admit()
        for node in self.nodes:
            self._ask(node)
        self.clock.at(TICK, self._tick)
        before = self._marks()
        self._goal, first = warm, 0
        if self.clock.run(most_seconds):
            before, first, self._goal = self._marks(), warm, warm + steps
            self._latency.clear()
            self._stale.clear()
            self.clock.run(most_seconds)
        return self._outcome(before, self._marks(), self.steps[first:])

    def _tick(self, _: object) -> None:
        """Heartbeats of all nodes, the polls that run out and the housekeeping, for as long as a tick takes."""
        cost, world = self._cost, self.world
        beat = cost["beat_call"] + cost["beat_each"] * self._playing / world.nodes
        polls = 2 * cost["nothing"] * len(self._waiting) / LEASE_WAIT
        used = world.nodes * beat / world.heartbeat + polls + cost["idle"]
        ended = self.ledger.serve(self.clock.now, used * TICK)
        self.clock.at(max(self.clock.now + TICK, ended - 1.0), self._tick)  # who gets no answer does not ask again

    # ------------------------------------------------------------ tasks

    def _admit(self) -> None:
        """As many groups as keep everything within the bound."""
        world = self.world
        for _ in range(world.window - self._outstanding):
            group = Group(self.version, world.group_size)
            self._pending.extend([group] * world.group_size)
            self._outstanding += 1

    def _ask(self, node: Node) -> None:
        """A node's question for tasks, as soon as it has room and no other question under way."""
        if not node.asking and node.playing < self.world.capacity:
            node.asking = True
            self._answer(node, self.clock.now)

    def _answer(self, node: Node, asked: float) -> None:
        leased = self._lease(node)
        cost = self._cost
        if not leased:
            self.ledger.serve(self.clock.now, cost["nothing"])
            self._waiting.append(node)
            return
        ended = self.ledger.serve(self.clock.now, cost["lease_call"] + cost["lease_each"] * len(leased))
        ended += self.costs.ledger.sync + ROUND_TRIP
        self._note("lease", ended - asked)
        node.playing += len(leased)
        self._playing += len(leased)
        self.clock.at(ended, self._begin, (node, leased))

    def _lease(self, node: Node) -> list[Group]:
        """By the free slots, and fewer where the node's weights are behind."""
        world = self.world
        behind = self.version - node.version
        if behind > world.staleness:
            return []
        allowed = max(1, int(world.capacity * (1 - max(behind, 0) / (world.staleness + 1)) + 1e-9))
        want = min(allowed - node.playing, len(self._pending))
        return [self._pending.popleft() for _ in range(want)]

    def _tell(self) -> None:
        """Tasks may be pending: waiting nodes ask again in a moment."""
        if self._waiting and self._pending and not self._told:
            self._told = True
            self.clock.at(max(self.clock.now + NEWS_PAUSE, self.ledger.free), self._wake)

    def _wake(self, _: object) -> None:
        self._told = False
        waiting, self._waiting = self._waiting, deque()
        for node in waiting:
            self._answer(node, self.clock.now)

    # ------------------------------------------------------------ episodes

    def _begin(self, what: tuple[Node, list[Group]]) -> None:
        node, groups = what
        node.asking = False
        for group in groups:
            self._turn(self._drawn(node, group))
        self._ask(node)

    def _drawn(self, node: Node, group: Group) -> Episode:
        work = self.world.work
        mean = math.log(work.mean_tokens) - work.sigma**2 / 2
        tokens = (
            min(self._random.lognormvariate(mean, work.sigma), work.most_tokens) if work.sigma else work.mean_tokens
        )
        return Episode(node, group, node.version, tokens / work.turns, work.turns, int(tokens) + work.given_tokens)

    def _turn(self, episode: Episode) -> None:
        """A call: through the gateway into the engine."""
        node, parts = episode.node, self.costs.parts
        cost = parts.gateway_call + parts.gateway_token * episode.turn_tokens
        begun = node.gateway.serve(self.clock.now, cost)
        self.clock.at(begun, self._decode, episode)

    def _decode(self, episode: Episode) -> None:
        engine = episode.node.engine
        self._number += 1
        engine.add(self.clock.now, episode.turn_tokens, self._number, episode)
        self._look_at(episode.node)

    def _look_at(self, node: Node) -> None:
        """An event that comes too early finds nothing ended and looks again: only too late ones must be replaced."""
        end = node.engine.next_end()
        if end < node.engine.due:
            node.engine.due = end
            self.clock.at(end, self._decoded, (node, end))

    def _decoded(self, what: tuple[Node, float]) -> None:
        node, due = what
        if due != node.engine.due:
            return
        node.engine.due = math.inf
        for episode in node.engine.ended(self.clock.now):
            episode.turns -= 1
            if episode.turns:
                tool = self.world.work.tool_seconds
                wait = self._random.expovariate(1 / tool) if tool else 0.0
                self.clock.at(self.clock.now + wait, self._turn, episode)
            else:
                self._put(episode)
        self._look_at(node)

    # ------------------------------------------------------------ pushing

    def _put(self, episode: Episode) -> None:
        """To the less busy of two units, as far as a node can tell."""
        parts, size = self.costs.parts, episode.tokens * TOKEN_BYTES
        number = self._random.randrange(len(self.units))
        other = self._random.randrange(len(self.units))
        if self.units[other].free < self.units[number].free:
            number = other
        taken = self.units[number].serve(self.clock.now, parts.put_call + parts.put_byte * size)
        written = self.disks[number % len(self.disks)].serve(taken, parts.disk_byte * size)
        ended = written + size / NETWORK + ROUND_TRIP
        self._note("put", ended - self.clock.now)
        self.clock.at(ended, self._push, episode)

    def _push(self, episode: Episode) -> None:
        node = episode.node
        node.unsent.append(episode)
        if node.sending < UNDER_WAY:
            self._send(node)

    def _send(self, node: Node) -> None:
        episodes, node.unsent = node.unsent[:TOGETHER], node.unsent[TOGETHER:]
        node.sending += 1
        cost = self._cost
        ended = self.ledger.serve(self.clock.now, cost["complete_call"] + cost["complete_each"] * len(episodes))
        self._note("complete", ended + self.costs.ledger.sync + ROUND_TRIP - self.clock.now)
        self.clock.at(ended, self._completed, episodes)

    def _completed(self, episodes: list[Episode]) -> None:
        """The ledger has taken them; their node gets the answer when they are on the disk."""
        for episode in episodes:
            group = episode.group
            group.left -= 1
            group.oldest = min(group.oldest, episode.version) if group.tokens else episode.version
            group.tokens.append(episode.tokens)
            if group.expired:
                continue
            self._started.add(group)
            if not group.left:
                self._started.discard(group)
                self._complete(group)
        self.clock.at(self.clock.now + self.costs.ledger.sync + ROUND_TRIP, self._sent, episodes)

    def _sent(self, episodes: list[Episode]) -> None:
        node = episodes[0].node
        node.sending -= 1
        node.playing -= len(episodes)
        self._playing -= len(episodes)
        if node.unsent:
            self._send(node)
        self._ask(node)

    def _complete(self, group: Group) -> None:
        if self.version - group.oldest > self.world.staleness:
            self._expire([group])
        else:
            self._number += 1
            heapq.heappush(self._ready, (group.oldest, self._number, group))
        self._tell()
        self._look_for_batch()

    # ------------------------------------------------------------ the trainer

    def _look_for_batch(self) -> None:
        """The trainer's poll is woken, at most every `NEWS_PAUSE`."""
        if not self._training and not self._looking:
            self._looking = True
            self.clock.at(max(self.clock.now + NEWS_PAUSE, self.ledger.free), self._open)

    def _open(self, _: object) -> None:
        """With the earliest deadlines; when there are too few, the ledger has read them for nothing."""
        self._looking = False
        world, cost = self.world, self._cost
        if len(self._ready) < world.groups:
            self.ledger.serve(self.clock.now, cost["peek"] * max(1, len(self._ready)))
            return
        self._training = True
        batch = [heapq.heappop(self._ready)[2] for _ in range(world.groups)]
        self._stale += [self.version - group.oldest for group in batch]
        samples = [tokens for group in batch for tokens in group.tokens]
        leased = self.ledger.serve(self.clock.now, (cost["open"] + world.ranks * cost["rank"]) * len(samples))
        leased += self.costs.ledger.sync + ROUND_TRIP
        self._note("batch", leased - self.clock.now)
        self.clock.at(leased, self._train, samples)

    def _train(self, samples: list[int]) -> None:
        read = self._read(samples)
        self._note("read", read - self.clock.now)
        step = self._step_seconds(samples)
        self._train_busy += step
        self.clock.at(read + step, self._commit, (len(samples), read - self._trainer_free, step))

    def _read(self, samples: list[int]) -> float:
        """Every rank reads its part from all units that have some of it; when the last of them has it."""
        parts, units = self.costs.parts, self.units
        size = sum(samples) * TOKEN_BYTES
        calls = self.world.ranks * min(len(units), -(-len(samples) // self.world.ranks))
        work = (parts.get_call * calls + parts.get_byte * size) / len(units)
        ended = max(unit.serve(self.clock.now, work) for unit in units)
        return ended + size / self.world.ranks / NETWORK + ROUND_TRIP

    def _step_seconds(self, samples: list[int]) -> float:
        """Return the seconds of the rank with the most tokens: ranks are balanced as far as the longest sample
        allows."""
        longest = max(samples)
        return max(sum(samples) / self.world.ranks, longest) / self.world.device.train_rate

    def _commit(self, what: tuple[int, float, float]) -> None:
        ended = self.ledger.serve(self.clock.now, self._cost["commit"] * what[0])
        self._note("commit", ended + self.costs.ledger.sync + ROUND_TRIP - self.clock.now)
        self.clock.at(ended, self._committed, what)

    def _committed(self, what: tuple[int, float, float]) -> None:
        samples, wait, step = what
        self.version += 1
        self.trained += samples
        self.steps.append(Step(self.version, self.clock.now, step, wait))
        self.clock.stopped = self.version >= self._goal
        self._outstanding -= self.world.groups
        self._expire_old()
        self._admit()
        self._training, self._trainer_free = False, self.clock.now
        self.clock.at(self.clock.now + self.world.device.encode, self._publish, self.version)
        self._tell()
        self._look_for_batch()

    def _expire_old(self) -> None:
        bound = self.version - self.world.staleness
        late = [group for group in self._started if group.oldest < bound]
        while self._ready and self._ready[0][0] < bound:
            late.append(heapq.heappop(self._ready)[2])
        self._expire(late)

    def _expire(self, groups: Iterable[Group]) -> None:
        for group in groups:
            group.expired = True
            self._started.discard(group)
            self._outstanding -= 1
            self.expired += 1

    # ------------------------------------------------------------ weights

    def _publish(self, version: int) -> None:
        """Beside the next step; relays have it once, and nodes from their relay."""
        self._published = version
        for node in self.nodes:
            if not node.pulling:
                self._pull(node)

    def _pull(self, node: Node) -> None:
        node.pulling = True
        parts, size = self.costs.parts, self.world.device.delta
        cost = parts.serve_call + max(parts.serve_byte, 1 / NETWORK) * size
        relay = self.relays[node.name % len(self.relays)]
        first = node.name < len(self.relays)
        there = self.weights.serve(self.clock.now, cost) if first else self.clock.now
        self.clock.at(relay.serve(there, cost) + ROUND_TRIP, self._loaded, (node, self._published))

    def _loaded(self, what: tuple[Node, int]) -> None:
        node, version = what
        node.pulling = False
        node.version = version
        node.engine.pause(self.clock.now, self.world.device.pause)
        if version < self._published:
            self._pull(node)

    # ------------------------------------------------------------ what came of it

    def _note(self, what: str, seconds: float) -> None:
        self._latency.setdefault(what, []).append(seconds)

    def _marks(self) -> dict[str, float]:
        now = self.clock.now

        def done(server: Server) -> float:
            return server.busy - max(0.0, server.free - now)

        for node in self.nodes:
            node.engine.move(now)
        count = len(self.nodes)
        full = self.world.capacity / (self.world.device.step + self.world.slots * self.world.device.sequence)
        return {
            "time": now,
            "trained": float(self.trained),
            "expired": float(self.expired),
            "training GPUs": self._train_busy,
            "rollout GPUs": sum(node.engine.tokens for node in self.nodes) / full / count,
            "ledger": done(self.ledger),
            "units": max(map(done, self.units)),
            "disks": max(map(done, self.disks)),
            "gateways": sum(done(node.gateway) for node in self.nodes) / count,
            "weight server": done(self.weights),
            "relays": max(map(done, self.relays)),
        }

    def _outcome(self, before: dict[str, float], after: dict[str, float], steps: list[Step]) -> Outcome:
        made = {name: after[name] - before[name] for name in after}
        seconds = made.pop("time")
        samples, expired = int(made.pop("trained")), int(made.pop("expired"))
        wait = wait_fraction(steps) or 0.0
        entered = samples + expired * self.world.group_size
        return Outcome(
            seconds=seconds,
            steps=len(steps),
            samples=samples,
            expired=expired,
            staleness=sum(self._stale) / max(1, len(self._stale)),
            wait=wait,
            decision=decide(self.world.nodes, wait, entered, samples),
            latency={name: sum(times) / len(times) for name, times in self._latency.items()},
            busy={name: used / seconds for name, used in made.items()},
        )
