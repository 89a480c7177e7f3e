"""A shop like WebShop's: search, look at results, choose options, buy.

Actions are `search[words]` and `click[text of a button]`, as published. `click[buy now]` ends the episode with the
reward of the purchase (`worth`). The products are made from the world's number, so each goal has its own.

The reward is WebShop's: the share of the goal's attributes, options and price that the purchase meets, times how well
its type fits. Two things differ from the published code, which uses a spaCy model for them: the nouns of a title are
its words of three letters and more, and similar attributes are those that share most of their words.

Invariants: the wanted product always exists and has the reward 1 with the wanted options. The splits want different
pairs of kind and colour; every kind and every colour is sold in both.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rillflow.agents.environments.bases import Turn, World, rows, world_random
from rillflow.agents.environments.splits import check_split, held_out

_WORD = re.compile(r"[a-z0-9]+")
_FOUND = 50  # most products of a search
_NEAR = 0.85
_EXACT = ("size",)  # options that must match exactly


@dataclass(frozen=True)
class Product:
    """A product. `query` is a search that finds its kind, `category` its place in the shop's hierarchy."""

    id: str
    title: str
    query: str
    category: str
    price: float
    attributes: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""
    features: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join((self.title, self.description, *self.features)).lower()


@dataclass(frozen=True)
class Goal:
    """What a customer wants. `product` is a product that meets all of it."""

    instruction: str
    product: str
    title: str
    query: str
    category: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price: float


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Index:
    """BM25 over the texts of products; equal scores keep the catalogue's order."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = list(products)
        self.of = {product.id: product for product in products}
        self._counts = [
            Counter(words(f"{product.text} {product.query} {' '.join(product.attributes)}")) for product in products
        ]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = max(1.0, sum(self._lengths) / max(1, len(self._lengths)))
        seen = Counter(word for counts in self._counts for word in counts)
        self._weight = {word: math.log(1 + (len(products) - n + 0.5) / (n + 0.5)) for word, n in seen.items()}

    def search(self, query: str) -> list[Product]:
        asked = [word for word in words(query) if word in self._weight]
        scores = [self._score(place, asked) for place in range(len(self.products))]
        order = sorted((place for place, score in enumerate(scores) if score > 0), key=lambda place: -scores[place])
        return [self.products[place] for place in order[:_FOUND]]

    def _score(self, place: int, asked: Sequence[str]) -> float:
        counts, length = self._counts[place], self._lengths[place]
        damp = 0.9 * (0.6 + 0.4 * length / self._mean)
        return sum(self._weight[word] * counts[word] * 1.9 / (counts[word] + damp) for word in asked if counts[word])


def worth(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> float:
    """Return the reward of a purchase, from 0 to 1."""
    met = _attributes_met(goal, bought) + _options_met(goal, bought, chosen) + (bought.price <= goal.price)
    return type_worth(goal, bought) * met / (len(goal.attributes) + len(goal.options) + 1)


def type_worth(goal: Goal, bought: Product) -> float:
    wanted = {word for word in words(goal.title) if len(word) > 2}
    share = len(wanted & set(words(bought.title))) / len(wanted) if wanted else 0.2
    shelves = {part.strip() for part in goal.category.split("›")} & {
        part.strip() for part in bought.category.split("›")
    }
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if bought.query == goal.query or len(shelves) >= 2 or share > 0.2 else 0.5


def _attributes_met(goal: Goal, bought: Product) -> int:
    return sum(
        any(near(attribute, other) for other in bought.attributes) or attribute.lower() in bought.text
        for attribute in goal.attributes
    )


def _options_met(goal: Goal, bought: Product, chosen: Mapping[str, str]) -> int:
    """Return how many chosen options the goal names; never more than it names."""
    wanted = [value.lower() for value in goal.options.values()]
    met = 0
    for name, value in chosen.items():
        exact = name.lower() in _EXACT
        met += value.lower() in wanted if exact else any(near(value, other) for other in wanted)
    return min(met, len(wanted))


def near(one: str, other: str) -> bool:
    """Return whether two texts share most of their words."""
    a, b = set(words(one)), set(words(other))
    return bool(a and b) and len(a & b) / min(len(a), len(b)) > _NEAR


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
