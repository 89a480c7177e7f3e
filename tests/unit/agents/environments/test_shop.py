"""The reward of a purchase, and the shop's pages."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from needs import WEBSHOP_DATA
from rillflow.agents.environments.shop import Goal, Index, Product, Shop, near, worth
from rillflow.agents.environments.webshop import WebShop, load, prompts
from rillflow.errors import ConfigError

WANTED = Product("B1", "soft cotton shirt", "shirt", "clothes › shirt", 20.0, ("soft", "machine washable"),
                 {"color": ("red", "blue"), "size": ("large", "extra large")})  # fmt: skip
GOAL = Goal("", "B1", WANTED.title, "shirt", WANTED.category, WANTED.attributes, {"color": "red", "size": "large"}, 30)


def test_worth_is_the_published_share() -> None:
    right = {"color": "red", "size": "large"}
    assert worth(GOAL, WANTED, right) == 1.0
    assert worth(GOAL, WANTED, {"color": "red"}) == pytest.approx(4 / 5)
    assert worth(GOAL, WANTED, {"color": "red", "size": "extra large"}) == pytest.approx(4 / 5)  # sizes match exactly
    assert worth(GOAL, dataclasses.replace(WANTED, price=31.0), right) == pytest.approx(4 / 5)
    assert worth(GOAL, dataclasses.replace(WANTED, attributes=("soft",)), right) == pytest.approx(4 / 5)


def test_another_kind_of_product_is_worth_less() -> None:
    lamp = dataclasses.replace(WANTED, title="steel lamp", query="lamp", category="home › lamp")
    assert worth(GOAL, lamp, {"color": "red", "size": "large"}) == 0.0
    far = dataclasses.replace(lamp, title="soft lamp", query="lamp")
    goal = dataclasses.replace(GOAL, title="soft cotton shirt men long sleeve summer", query="shirt")
    assert worth(goal, far, {"color": "red", "size": "large"}) == pytest.approx(0.5)


def test_choosing_more_options_than_wanted_earns_no_more() -> None:
    goal = dataclasses.replace(GOAL, options={"color": "red"})
    assert worth(goal, WANTED, {"color": "red", "shade": "red"}) == 1.0


def test_near_words() -> None:
    assert near("machine washable", "washable machine")
    assert not near("machine washable", "hand washable")


def test_search_finds_by_words_and_nothing_by_others() -> None:
    index = Index([WANTED, dataclasses.replace(WANTED, id="B2", title="wool hat", query="hat")])
    assert [product.id for product in index.search("hat")] == ["B2"]
    assert index.search("moon") == []


async def test_buttons_are_those_of_the_page() -> None:
    environment = Shop()
    seen = await environment.reset({"world": 1}, 0)
    assert (await environment.step("click[buy now]")).info["invalid"]
    seen = await environment.step("search[shirt lamp pan]")
    assert seen.actions is not None
    assert "click[buy now]" not in seen.actions
    assert (await environment.step("search[again]")).info["invalid"]
    item = next(action for action in seen.actions if action.startswith("click[b"))
    assert "click[buy now]" in ((await environment.step(item)).actions or ())


def _write_data(folder: Path) -> None:
    products = [
        {"asin": f"B00{n}", "name": f"cotton shirt {n}", "query": "Shirt ", "product_category": "Clothing › Shirts",
         "pricing": "$10.00 $20.00", "full_description": "A shirt.", "small_description": ["soft"],
         "customization_options": {"Color": [{"value": "Red"}, {"value": "Blue"}]}}
        for n in range(8)
    ]  # fmt: skip
    (folder / "items_shuffle_1000.json").write_text(json.dumps(products))
    about = {row["asin"]: {"attributes": ["soft", "light weight"]} for row in products}
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(about))
    asked = {
        row["asin"]: [{"instruction": f"i want shirt {n}.", "instruction_attributes": ["soft"],
                       "instruction_options": {"color": "red"}}]
        for n, row in enumerate(products)
    }  # fmt: skip
    (folder / "items_human_ins.json").write_text(json.dumps(asked))


async def test_webshop_files_are_read_and_played(tmp_path: Path) -> None:
    _write_data(tmp_path)
    environment = WebShop(folder=str(tmp_path))
    for row in prompts("heldout", 3, 1, folder=str(tmp_path)):
        await environment.reset(row["payload"], 0)
        for action in await environment.plan():
            seen = await environment.step(action)
        assert seen.reward == 1.0
    train = {row["payload"]["goal"] for row in prompts("train", 50, 1, folder=str(tmp_path))}
    heldout = {row["payload"]["goal"] for row in prompts("heldout", 50, 1, folder=str(tmp_path))}
    assert not train & heldout


def test_webshop_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="items_ins_v2"):
        load(str(tmp_path))


@pytest.mark.needs("webshop")
async def test_webshop_itself() -> None:
    environment = WebShop(folder=WEBSHOP_DATA, products=1000)
    (row,) = prompts("train", 1, 1, folder=WEBSHOP_DATA, products=1000)
    assert (await environment.reset(row["payload"], 0)).text
