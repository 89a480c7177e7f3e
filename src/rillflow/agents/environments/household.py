"""A household like ALFWorld's: a room with receptacles and things, and one errand to do in it.

The six kinds of errands: put a thing somewhere (`place`), put it there `clean`, `heat`ed or `cool`ed, put `two` of them
there, and look at one under a lamp (`light`). The content of a receptacle is visible only from nearby, and only if its
door is open. The reward is 1 when the errand is done and 0 before.

Invariants: every world can be won, and `plan` wins it with only what was seen. The splits ask for different pairs of
thing and target; every thing and every place occurs in both.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rillflow.agents.environments.bases import Turn, World, rows, world_random
from rillflow.agents.environments.splits import check_split, held_out


class Scene(NamedTuple):
    """A kind of room: its possible receptacles, its fixtures, its things and its errands."""

    places: tuple[str, ...]
    fixtures: tuple[str, ...]
    things: tuple[str, ...]
    tasks: tuple[str, ...]


SCENES = {
    "kitchen": Scene(
        ("table", "shelf", "drawer", "box", "cupboard"),
        ("fridge", "stove", "sink"),
        ("cup", "plate", "apple", "egg", "potato", "fork", "pan", "bowl"),
        ("place", "clean", "heat", "cool", "two"),
    ),
    "bathroom": Scene(
        ("shelf", "drawer", "box", "bin", "cupboard"),
        ("sink",),
        ("soap", "towel", "cloth", "sponge", "bottle", "candle", "brush", "comb"),
        ("place", "clean", "two"),
    ),
    "bedroom": Scene(
        ("desk", "bed", "shelf", "drawer", "box"),
        ("lamp",),
        ("book", "pen", "phone", "key", "watch", "clock", "sock", "ball"),
        ("place", "light", "two"),
    ),
    # Each of these words is one token of the shipped tiny policy.
    "storeroom": Scene(
        ("red box", "blue box", "green box", "black box", "white box"),
        (),
        ("pens", "cups", "books", "keys", "coins", "socks", "nails", "balls"),
        ("place", "two"),
    ),
}
DOORS = {"drawer", "cupboard", "fridge"}
# Errands that change a thing: its state afterwards, and where it is changed.
CHANGES = {"clean": ("clean", "sink"), "heat": ("hot", "stove"), "cool": ("cold", "fridge")}
TASKS = ("place", "clean", "heat", "cool", "two", "light")
SIZES = ("small", "full")
_PUT = re.compile(r"(?:put|move) (.+?) (?:in/on|in|on|into|to) (.+)")
_TAKE = re.compile(r"take (.+?)(?: from (.+))?")
_WITH = re.compile(r"(clean|heat|cool) (.+?) with (.+)")


@dataclass
class Room:
    """The state of a room. `where` maps each thing to a receptacle, or to `hand`."""

    spots: list[str]
    where: dict[str, str]
    here: str | None = None
    open: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    states: dict[str, str] = field(default_factory=dict)
    lit: bool = False

    def held(self) -> str | None:
        return next((thing for thing, spot in self.where.items() if spot == "hand"), None)

    def shut(self, spot: str) -> bool:
        return kind_of(spot) in DOORS and spot not in self.open

    def inside(self, spot: str) -> list[str]:
        return [thing for thing, place in self.where.items() if place == spot]


@dataclass(frozen=True)
class Errand:
    """An errand: bring `count` things of a kind, in one state, to a receptacle of a kind."""

    task: str
    thing: str
    place: str

    @property
    def count(self) -> int:
        return 2 if self.task == "two" else 1

    def __str__(self) -> str:
        if self.task == "light":
            return f"look at {self.thing} under the lamp"
        what = f"two of {self.thing}" if self.task == "two" else self.thing
        if self.task in CHANGES:
            what = f"{CHANGES[self.task][0]} {self.thing}"
        return f"put {what} in {self.place}"

    def fits(self, room: Room, thing: str) -> bool:
        """Return whether a thing has the kind and the state that the errand asks for."""
        right = kind_of(thing) == self.thing
        return right and (self.task not in CHANGES or room.states.get(thing) == CHANGES[self.task][0])

    def delivered(self, room: Room) -> list[str]:
        if self.task == "light":
            return []
        return [thing for thing, spot in room.where.items() if kind_of(spot) == self.place and self.fits(room, thing)]

    def done(self, room: Room) -> bool:
        if self.task == "light":
            held = room.held()
            return room.lit and held is not None and kind_of(held) == self.thing
        return len(self.delivered(room)) >= self.count


class Household(World):
    """A payload has `world`, `scene`, `task`, `thing`, `place` and `size`; missing ones are drawn at random."""

    def __init__(self, *, steps: int = 50, size: str = "full") -> None:
        super().__init__(steps=steps)
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
        self._size = size
        self.room = Room([], {})
        self.errand = Errand("place", "", "")

    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        draw = world_random("household", payload, seed)
        scene = payload.get("scene") or draw.choice(sorted(SCENES))
        kind = SCENES[scene]
        self.errand = Errand(
            payload.get("task") or draw.choice(kind.tasks),
            payload.get("thing") or draw.choice(kind.things),
            payload.get("place") or draw.choice(kind.places),
        )
        self.room = furnish(kind, self.errand, payload.get("size", self._size), draw)
        return f"You are in a {scene} with {', '.join(self.room.spots)}. Task: {self.errand}."

    def act(self, action: str) -> Turn:
        text = obey(self.room, action.lower())
        if text is None:
            return Turn("Nothing happens.", invalid=True)
        if self.errand.done(self.room):
            return Turn(f"{text} Well done.", 1.0, done=True)
        return Turn(text)

    def actions(self) -> list[str] | None:
        return sorted(possible(self.room))

    async def plan(self) -> list[str]:
        """Return the actions of a player that knows the errand and what was seen, and searches in order."""
        room, found = copy.deepcopy(self.room), []
        while not self.errand.done(room):
            found.append(search(room, self.errand))
            obey(room, found[-1])
        return found


def kind_of(name: str) -> str:
    return name.rpartition(" ")[0]


def furnish(scene: Scene, errand: Errand, size: str, draw: random.Random) -> Room:
    """Return a room in which the errand is possible and not yet done."""
    needed = list(scene.fixtures) if size == "full" else _needed(scene, errand)
    others = [place for place in scene.places if place != errand.place]
    if size == "small":
        kinds = [errand.place, *draw.sample(others, 2), *needed]
        spots = [f"{kind} 1" for kind in kinds if kind]
    else:
        kinds = [errand.place, *others, *needed]
        spots = [f"{kind} {n}" for kind in kinds for n in range(1, 1 + draw.choice((1, 1, 2)))]
    spots.sort()
    wanted = [f"{errand.thing} {n}" for n in range(1, 1 + errand.count + (size == "full" and draw.random() < 0.3))]
    rest = [thing for thing in scene.things if thing != errand.thing]
    extra = [f"{thing} 1" for thing in draw.sample(rest, 2 if size == "small" else 6)]
    elsewhere = [spot for spot in spots if kind_of(spot) not in (errand.place, "lamp")]
    holders = [spot for spot in spots if kind_of(spot) != "lamp"]
    where = {thing: draw.choice(elsewhere) for thing in wanted} | {thing: draw.choice(holders) for thing in extra}
    return Room(spots, {thing: where[thing] for thing in sorted(where)})


def _needed(scene: Scene, errand: Errand) -> list[str]:
    if errand.task == "light":
        return ["lamp"]
    return [CHANGES[errand.task][1]] if errand.task in CHANGES else []


def view(room: Room) -> str:
    if room.here is None:
        return "You stand in the middle of the room."
    if room.shut(room.here):
        return f"{room.here} is closed."
    room.seen.add(room.here)
    return f"{room.here} has {', '.join(room.inside(room.here)) or 'nothing'}."


def obey(room: Room, action: str) -> str | None:
    """Take an action and return what is seen then, or None if the action makes no sense."""
    return next((said for rule in _RULES if (said := rule(room, action)) is not None), None)


def _look(room: Room, action: str) -> str | None:
    if action == "inventory":
        return f"You hold {room.held() or 'nothing'}."
    return view(room) if action in ("look", "look around") else None


def _go(room: Room, action: str) -> str | None:
    spot = action.removeprefix("go to ")
    if spot == action or spot not in room.spots or spot == room.here:
        return None
    room.here, room.lit = spot, False
    return view(room)


def _door(room: Room, action: str) -> str | None:
    verb, _, spot = action.partition(" ")
    if verb not in ("open", "close") or spot != room.here or kind_of(spot) not in DOORS:
        return None
    if (verb == "open") != room.shut(spot):
        return None
    room.open ^= {spot}
    return view(room)


def _lamp(room: Room, action: str) -> str | None:
    if room.here is None or kind_of(room.here) != "lamp" or action != f"use {room.here}":
        return None
    room.lit = True
    return f"{room.here} is on."


def _change(room: Room, action: str) -> str | None:
    match = _WITH.fullmatch(action)
    if match is None or room.here is None:
        return None
    word, thing, tool = match.groups()
    if thing != room.held() or tool != room.here or CHANGES[word][1] != kind_of(tool):
        return None
    room.states[thing] = CHANGES[word][0]
    return f"{thing} is {CHANGES[word][0]}."


def _take(room: Room, action: str) -> str | None:
    match = _TAKE.fullmatch(action)
    if match is None or room.here is None or room.held() is not None:
        return None
    thing, spot = match.group(1), match.group(2) or room.here
    if spot != room.here or room.shut(spot) or room.where.get(thing) != spot:
        return None
    room.where[thing] = "hand"
    return f"You take {thing}."


def _put(room: Room, action: str) -> str | None:
    match = _PUT.fullmatch(action)
    if match is None or room.here is None:
        return None
    thing, spot = match.groups()
    if thing != room.held() or spot != room.here or room.shut(spot) or kind_of(spot) == "lamp":
        return None
    room.where[thing] = spot
    return f"You put {thing} in {spot}."


_RULES = (_look, _go, _door, _lamp, _change, _take, _put)


def possible(room: Room) -> Iterator[str]:
    yield from ("look", "inventory")
    here, held = room.here, room.held()
    yield from (f"go to {spot}" for spot in room.spots if spot != here)
    if here is None:
        return
    kind = kind_of(here)
    if kind == "lamp":
        yield f"use {here}"
        return
    if kind in DOORS:
        yield f"{'open' if room.shut(here) else 'close'} {here}"
    if held is not None:
        yield from (f"{word} {held} with {here}" for word, (_, tool) in CHANGES.items() if tool == kind)
    if room.shut(here):
        return
    if held is not None:
        yield f"put {held} in {here}"
    else:
        yield from (f"take {thing} from {here}" for thing in room.inside(here))


def search(room: Room, errand: Errand) -> str:
    """Return the next action of a player that knows the rules and what was seen, and searches in the room's order."""
    held = room.held()
    if held is not None and kind_of(held) == errand.thing:
        return _bring(room, errand, held)
    if held is not None:  # another thing: put it down
        spot = room.here if room.here is not None and kind_of(room.here) != "lamp" else room.spots[0]
        return _at(room, spot) or f"put {held} in {spot}"
    done = errand.delivered(room)
    known = [thing for thing, spot in room.where.items() if spot in room.seen and kind_of(thing) == errand.thing]
    for thing in known:
        if thing not in done:
            return _at(room, room.where[thing]) or f"take {thing} from {room.where[thing]}"
    spot = next(spot for spot in room.spots if spot not in room.seen and kind_of(spot) != "lamp")
    action = _at(room, spot)
    return action or "look"


def _bring(room: Room, errand: Errand, held: str) -> str:
    if errand.task == "light":
        lamp = next(spot for spot in room.spots if kind_of(spot) == "lamp")
        return f"use {lamp}" if room.here == lamp else f"go to {lamp}"
    if not errand.fits(room, held):
        tool = next(spot for spot in room.spots if kind_of(spot) == CHANGES[errand.task][1])
        return f"{errand.task} {held} with {tool}" if room.here == tool else f"go to {tool}"
    target = next(spot for spot in room.spots if kind_of(spot) == errand.place)
    return _at(room, target) or f"put {held} in {target}"


def _at(room: Room, spot: str) -> str | None:
    """Return the next action towards an open receptacle, or None if the player stands there."""
    if room.here != spot:
        return f"go to {spot}"
    return f"open {spot}" if room.shut(spot) else None


def errands(split: str) -> list[tuple[str, str, str, str]]:
    """Return all (scene, task, thing, place) of a split."""
    check_split(split)
    return [
        (name, task, thing, place)
        for name, scene in SCENES.items()
        for task in scene.tasks
        for row, thing in enumerate(scene.things)
        for column, place in enumerate(scene.places)
        if held_out(row, column) == (split == "heldout")
    ]


def prompts(
    split: str,
    count: int,
    seed: int,
    *,
    size: str = "full",
    tasks: list[str] | None = None,
    scenes: list[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield errands of a split, each in its own room; `tasks` and `scenes` select kinds."""
    choices = [errand for errand in errands(split) if errand[0] in (scenes or SCENES) and errand[1] in (tasks or TASKS)]
    if not choices:
        raise ValueError(
            f"no errand is of these kinds: {tasks}, {scenes}; there are {', '.join(TASKS)} in {', '.join(SCENES)}"
        )
    draw = random.Random(f"household/{split}/{seed}")

    def payloads() -> Iterator[dict[str, Any]]:
        while True:
            scene, task, thing, place = draw.choice(choices)
            yield {
                "world": draw.randrange(1 << 30),
                "scene": scene,
                "task": task,
                "thing": thing,
                "place": place,
                "size": size,
            }

    yield from rows("household", payloads(), split, count, seed)
