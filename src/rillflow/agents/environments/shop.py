"""A shop like WebShop's: search, look at results, choose options, buy.

Actions are `search[words]` and `click[text of a button]`, as published. `click[buy now]` ends the episode with the
reward of the purchase (`catalogue.worth`). The catalogue is made from the world's number, so each goal has its own.

Invariants: the wanted product always exists and has the reward 1 with the wanted options. The splits want different
pairs of kind and colour; every kind and every colour is sold in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rillflow.agents.environments.catalogue import Goal, Index, Product, worth
from rillflow.agents.environments.splits import check_split, held_out
from rillflow.agents.environments.world import Turn, World, rows, world_random

KINDS = {
    "clothes": ("shirt", "jacket", "hat", "dress"),
    "kitchen": ("kettle", "pan", "bottle", "towel"),
    "home": ("lamp", "rug", "pillow", "chair"),
}
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "pink", "brown")
CHOICES = ("small", "medium", "large", "extra large")
ATTRIBUTES = (
    "soft",
    "light",
    "machine washable",
    "handmade",
    "waterproof",
    "long lasting",
    "easy to clean",
    "foldable",
)
SIZES = {"small": 5, "full": 60}
PAGE = 10
_ACTION = re.compile(r"(search|click)\[(.+)\]")
BACK, NEXT, BEFORE, BUY = "back to search", "next >", "< prev", "buy now"
_ALL_KINDS = [(category, kind) for category, kinds in KINDS.items() for kind in kinds]


class Shop(World):
    """A payload has `world`, `kind`, `colour` and `size`; missing ones are drawn at random."""

    def __init__(self, *, steps: int = 15, size: str = "full") -> None:
        super().__init__(steps=steps)
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
        self._size = size
        self._open(Index([]), Goal("", "", "", "", "", (), {}, 0.0))

    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        draw = world_random("shop", payload, seed)
        category, kind = next((pair for pair in _ALL_KINDS if pair[1] == payload.get("kind")), draw.choice(_ALL_KINDS))
        colour = payload.get("colour") or draw.choice(COLOURS)
        products, goal = stock(category, kind, colour, SIZES[payload.get("size", self._size)], draw)
        self._open(Index(products), goal)
        return f"{goal.instruction} {self._page()}"

    def _open(self, index: Index, goal: Goal) -> None:
        self.index, self.goal = index, goal
        self.found: list[Product] = []
        self.page = 0
        self.item: Product | None = None
        self.chosen: dict[str, str] = {}
        self.searched = False

    def act(self, action: str) -> Turn:
        match = _ACTION.fullmatch(action.lower())
        if match is None:
            return Turn("Say search[words] or click[button].", invalid=True)
        what, argument = match.group(1), match.group(2).strip()
        if what == "search":
            if self.searched:
                return Turn(f"There is no search field here. {self._page()}", invalid=True)
            self.found, self.page, self.searched = self.index.search(argument), 0, True
            return Turn(self._page())
        if argument not in self._buttons():
            return Turn(f"There is no such button. {self._page()}", invalid=True)
        return self._click(argument)

    def _click(self, button: str) -> Turn:
        if button == BUY:
            assert self.item is not None
            value = worth(self.goal, self.item, self.chosen)
            return Turn("Thank you for your purchase.", value, done=True)
        if button == BACK:
            self.found, self.item, self.chosen, self.searched = [], None, {}, False
        elif button == NEXT:
            self.page += 1
        elif button == BEFORE:
            if self.item is None:
                self.page -= 1
            self.item, self.chosen = None, {}
        elif self.item is None:
            self.item, self.chosen = self.index.of[button.upper()], {}
        else:
            name = next(name for name, values in self.item.options.items() if button in values)
            self.chosen[name] = button
        return Turn(self._page())

    def _shown(self) -> list[Product]:
        return self.found[self.page * PAGE : (self.page + 1) * PAGE]

    def _buttons(self) -> list[str]:
        if self.item is not None:
            options = [value for values in self.item.options.values() for value in values]
            return [*options, BUY, BEFORE, BACK]
        if not self.searched:
            return []
        turns = ([BEFORE] if self.page else []) + ([NEXT] if len(self.found) > (self.page + 1) * PAGE else [])
        return [*(product.id.lower() for product in self._shown()), *turns, BACK]

    def _page(self) -> str:
        if self.item is not None:
            item = self.item
            options = "".join(
                f" {name}: {', '.join(f'[{value}]' if self.chosen.get(name) == value else value for value in values)}."
                for name, values in item.options.items()
            )
            return f"{item.title}, ${item.price:g}. {item.description}{options}".strip()
        if not self.searched:
            return "You are at the search page."
        if not self.found:
            return "Nothing was found."
        return "Found: " + "; ".join(f"{p.id.lower()} {p.title} ${p.price:g}" for p in self._shown()) + "."

    def actions(self) -> list[str] | None:
        """Return the buttons; None on the search page, where any words are possible."""
        return sorted(f"click[{button}]" for button in self._buttons()) if self.searched else None

    async def plan(self) -> list[str]:
        """Return the actions that find the wanted product by its kind and attributes, and buy it."""
        query = " ".join((self.goal.query, *self.goal.attributes))
        place = [product.id for product in self.index.search(query)].index(self.goal.product)
        clicks = [NEXT] * (place // PAGE) + [self.goal.product.lower(), *self.goal.options.values(), BUY]
        back = [f"click[{BACK}]"] if self.searched else []
        return [*back, f"search[{query}]", *(f"click[{button}]" for button in clicks)]


def stock(category: str, kind: str, colour: str, size: int, draw: random.Random) -> tuple[list[Product], Goal]:
    """Return a catalogue of `size` products, and a goal that one of them meets."""
    ids = draw.sample(range(100, 1000), size)
    products = []
    for place, number in enumerate(ids):
        shelf, what = (category, kind) if place == 0 else _another(category, kind, draw)
        colours = tuple(sorted({colour if place == 0 else draw.choice(COLOURS), *draw.sample(COLOURS, 2)}))
        attributes = tuple(draw.sample(ATTRIBUTES, 2))
        products.append(
            Product(
                id=f"B{number}",
                title=f"{' '.join(attributes[:1])} {what}",
                query=what,
                category=f"{shelf} › {what}",
                price=draw.randrange(5, 95),
                attributes=attributes,
                options={"color": colours, "size": tuple(sorted(draw.sample(CHOICES, 2)))},
                description=f"It is {' and '.join(attributes)}.",
            )
        )
    wanted = products[0]
    options = {"color": colour, "size": draw.choice(wanted.options["size"])}
    limit = 10 * (int(wanted.price) // 10 + 1 + draw.randrange(2))
    text = (
        f"Buy a {kind} that is {' and '.join(wanted.attributes)}, color {options['color']}, size {options['size']}, "
        f"for at most ${limit}."
    )
    goal = Goal(text, wanted.id, wanted.title, kind, wanted.category, wanted.attributes, options, limit)
    draw.shuffle(products)
    return products, goal


def _another(category: str, kind: str, draw: random.Random) -> tuple[str, str]:
    """Return another product's kind. A third are of the wanted kind, so the kind alone does not find the product."""
    return (category, kind) if draw.random() < 1 / 3 else draw.choice(_ALL_KINDS)


def prompts(split: str, count: int, seed: int, size: str = "full") -> Iterator[dict[str, Any]]:
    """Yield `count` prompts of a split."""
    check_split(split)
    pairs = [
        (kind, colour)
        for row, (_, kind) in enumerate(_ALL_KINDS)
        for column, colour in enumerate(COLOURS)
        if held_out(row, column) == (split == "heldout")
    ]
    draw = random.Random(f"shop/{split}/{seed}")

    def payloads() -> Iterator[dict[str, Any]]:
        while True:
            kind, colour = draw.choice(pairs)
            yield {"world": draw.randrange(1 << 30), "kind": kind, "colour": colour, "size": size}

    yield from rows("shop", payloads(), split, count, seed)
