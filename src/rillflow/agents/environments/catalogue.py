"""Products, their search index, and the reward of a purchase.

The reward is WebShop's: the share of the goal's attributes, options and price that the purchase meets, times how well
its type fits. Two things differ from the published code, which uses a spaCy model for them: the nouns of a title are
its words of three letters and more, and similar attributes are those that share most of their words.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
