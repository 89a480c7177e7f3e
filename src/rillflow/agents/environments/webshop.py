"""WebShop's own products and goals in our shop; `folder` is WebShop's data folder.

It needs the files that WebShop's `setup.sh` downloads: `items_shuffle.json` or `items_shuffle_1000.json` (products),
`items_ins_v2.json` or `items_ins_v2_1000.json` (attributes), and `items_human_ins.json` (people's requests). Our
search is BM25 over the same texts; the first 500 goals are held out, as published.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rillflow.agents.environments.bases import rows
from rillflow.agents.environments.shop import Goal, Index, Product, Shop
from rillflow.agents.environments.splits import check_split
from rillflow.errors import ConfigError

HELD_OUT = 500
_PRICE = re.compile(r"\$\s*([\d,]*\.?\d+)")
_LIMITS = [10.0 * number for number in range(1, 100)]


class WebShop(Shop):
    """A payload has `goal`, the number of a goal."""

    def __init__(self, *, folder: str, products: int | None = None, steps: int = 15) -> None:
        super().__init__(steps=steps)
        self._all, self._goals = load(folder, products)

    def begin(self, payload: Mapping[str, Any], seed: int) -> str:
        number = int(payload.get("goal", seed)) % len(self._goals)
        self._open(self._all, self._goals[number])
        return f"{self.goal.instruction} {self._page()}"


@lru_cache(maxsize=2)
def load(folder: str, products: int | None = None) -> tuple[Index, list[Goal]]:
    """Return all products, and all goals in a fixed order."""
    home = Path(folder).expanduser()
    attributes = _read(home, "items_ins_v2.json", "items_ins_v2_1000.json")
    asked = _read(home, "items_human_ins.json")
    read: dict[str, Product] = {}
    for row in _read(home, "items_shuffle.json", "items_shuffle_1000.json")[:products]:
        number = str(row.get("asin"))
        if number != "nan" and len(number) <= 10 and number.upper() not in read:
            read[number.upper()] = _product(row, attributes.get(number, {}))
    goals = [goal for number, product in read.items() for goal in _goals(product, asked.get(number, []))]
    if not goals:
        raise ConfigError(f"no product in {home} has a goal", "give WebShop's items_human_ins.json beside its products")
    random.Random(233).shuffle(goals)
    return Index(list(read.values())), goals


def _read(home: Path, *names: str) -> Any:
    for name in names:
        if (home / name).is_file():
            return json.loads((home / name).read_text())
    raise ConfigError(f"{home} has no {' or '.join(names)}", "run WebShop's setup.sh and give its data folder")


def _product(row: Mapping[str, Any], about: Mapping[str, Any]) -> Product:
    points = row.get("small_description") or []
    prices = [float(price.replace(",", "")) for price in _PRICE.findall(row.get("pricing") or "")]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (row.get("customization_options") or {}).items()
        if values
    }
    return Product(
        id=str(row["asin"]).upper(),
        title=str(row["name"]),
        query=str(row["query"]).lower().strip(),
        category=str(row["product_category"]),
        price=sum(prices[:2]) / len(prices[:2]) if prices else 100.0,
        attributes=tuple(about.get("attributes", ())),
        options=options,
        description=str(row.get("full_description") or ""),
        features=tuple(points) if isinstance(points, list) else (str(points),),
    )


def _goals(product: Product, asked: list[Mapping[str, Any]]) -> Iterator[Goal]:
    for wish in asked:
        if not wish["instruction_attributes"]:
            continue
        options = wish.get("instruction_options") or {}
        named = options if isinstance(options, dict) else {str(n): value for n, value in enumerate(options)}
        draw = random.Random(f"webshop/{product.id}/{wish['instruction']}")
        above = [limit for limit in _LIMITS if limit > product.price][:4]
        limit = max(draw.sample(above, 2)) if len(above) >= 2 else 1_000_000.0
        price = f", and price lower than {limit:.2f} dollars" if limit < 1_000_000 else ""
        yield Goal(
            instruction=f"{wish['instruction'].strip('.')}{price}.",
            product=product.id,
            title=product.title,
            query=product.query,
            category=product.category,
            attributes=tuple(wish["instruction_attributes"]),
            options={name: str(value) for name, value in named.items()},
            price=limit,
        )


def prompts(
    split: str, count: int, seed: int, folder: str = "", products: int | None = None
) -> Iterator[dict[str, Any]]:
    check_split(split)
    _, goals = load(folder, products)
    held = min(HELD_OUT, len(goals) // 4)
    numbers = range(held) if split == "heldout" else range(held, len(goals))
    draw = random.Random(f"webshop/{split}/{seed}")
    payloads = ({"goal": draw.choice(numbers)} for _ in range(count))
    yield from rows("webshop", payloads, split, count, seed)
