"""The retail desk of `tau`: a database of customers, orders and products, the rules, and the tools.

Tools read and change only the database. A wrong call is described in the tool's answer. Tools enforce the rules that
they can check; they cannot check that a customer was identified and has agreed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Database = dict[str, dict[str, dict[str, Any]]]

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jana")
SURNAMES = ("Lee", "Moor", "Novak", "Ortiz", "Park", "Quist", "Rossi", "Sato")
STREETS = ("Oak Street", "Mill Road", "Lake Drive", "Hill Lane", "Park Avenue")
PRODUCTS = {
    "kettle": ("red", "black", "white"),
    "lamp": ("red", "green", "white"),
    "jacket": ("small", "medium", "large"),
    "shoes": ("38", "40", "42"),
    "backpack": ("blue", "black", "green"),
}
REASONS = ("no longer needed", "ordered by mistake")
RULES = (
    "You serve the customers of a shop. Find out who a customer is (name and zip code) before anything else. "
    "Say what you are going to change and wait for a yes before you change it. Only pending orders can be cancelled "
    f"or get another address; a cancellation has one of the reasons: {', '.join(REASONS)}. Only items of delivered "
    "orders can be returned or exchanged, an exchange for another variant of the same product only. What is against "
    "these rules you refuse, and tell the customer the order's status."
)


def make_database(draw: random.Random) -> Database:
    """Return six customers with two orders each, one pending and one delivered."""
    items = {
        f"I{number}": {"product": product, "variant": variant, "price": draw.randrange(5, 95)}
        for number, (product, variant) in enumerate(
            ((product, variant) for product, variants in PRODUCTS.items() for variant in variants), start=11
        )
    }
    names = draw.sample([f"{name} {surname}" for name in NAMES for surname in SURNAMES], 6)
    numbers = iter(draw.sample(range(100, 1000), 12))
    users: dict[str, dict[str, Any]] = {}
    orders: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(names):
        user = f"U{place + 1}"
        users[user] = {"name": name, "zip": str(draw.randrange(10000, 99999)), "orders": []}
        for status in draw.sample(("pending", "delivered"), 2):
            order = f"W{next(numbers)}"
            users[user]["orders"].append(order)
            orders[order] = {
                "user": user,
                "status": status,
                "items": sorted(draw.sample(sorted(items), draw.choice((1, 2)))),
                "address": f"{draw.randrange(1, 99)} {draw.choice(STREETS)}",
            }
    return {"users": users, "orders": orders, "items": items}


class Refused(Exception):
    """A tool refuses a call, with this reason."""


def find_user(data: Database, name: str, zip: str) -> Any:
    for number, user in data["users"].items():
        if user["name"].lower() == name.lower() and user["zip"] == zip:
            return {"user": number, **user}
    raise Refused("no such customer")


def get_order(data: Database, order: str) -> Any:
    found = _order(data, order)
    items = [{"item": item, **data["items"][item]} for item in found["items"]]
    return {**found, "items": items, "total": sum(item["price"] for item in items)}


def get_product(data: Database, product: str) -> Any:
    found = {number: item for number, item in data["items"].items() if item["product"] == product.lower()}
    if not found:
        raise Refused("no such product")
    return found


def cancel_order(data: Database, order: str, reason: str) -> Any:
    found = _order(data, order, "pending")
    if reason not in REASONS:
        raise Refused(f"the reason must be one of: {', '.join(REASONS)}")
    found |= {"status": "cancelled", "reason": reason}
    return "cancelled"


def change_address(data: Database, order: str, address: str) -> Any:
    _order(data, order, "pending")["address"] = address
    return "changed"


def return_item(data: Database, order: str, item: str) -> Any:
    found = _order(data, order, "delivered")
    _has(found, item)
    found["returned"] = sorted({*found.get("returned", []), item})
    return "returned"


def exchange_item(data: Database, order: str, item: str, new_item: str) -> Any:
    found = _order(data, order, "delivered")
    _has(found, item)
    new = data["items"].get(new_item)
    if new is None or new["product"] != data["items"][item]["product"] or new_item == item:
        raise Refused("the new item must be another variant of the same product")
    found["items"] = sorted([new_item, *(other for other in found["items"] if other != item)])
    return "exchanged"


def _order(data: Database, order: str, status: str | None = None) -> dict[str, Any]:
    found = data["orders"].get(order)
    if found is None:
        raise Refused("no such order")
    if status is not None and found["status"] != status:
        raise Refused(f"the order is {found['status']}, not {status}")
    return found


def _has(order: Mapping[str, Any], item: str) -> None:
    if item not in order["items"]:
        raise Refused("the order has no such item")


Tool = Callable[..., Any]
TOOLS: dict[str, tuple[Tool, str]] = {
    "find_user": (find_user, "Find a customer by name and zip code."),
    "get_order": (get_order, "Status, items, total and address of an order."),
    "get_product": (get_product, "All variants of a product with their item numbers and prices."),
    "cancel_order": (cancel_order, "Cancel a pending order."),
    "change_address": (change_address, "Send a pending order to another address."),
    "return_item": (return_item, "Take back an item of a delivered order."),
    "exchange_item": (exchange_item, "Exchange an item of a delivered order for another variant."),
}


def arguments_of(tool: Tool) -> list[str]:
    code = tool.__code__
    return list(code.co_varnames[1 : code.co_argcount])


def schemas() -> list[dict[str, Any]]:
    """Return the tools in OpenAI's format."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": {argument: {"type": "string"} for argument in arguments_of(tool)},
                    "required": arguments_of(tool),
                    "additionalProperties": False,
                },
            },
        }
        for name, (tool, about) in TOOLS.items()
    ]


def call(data: Database, name: Any, arguments: Any) -> tuple[str, bool]:
    """Return the tool's answer, and whether the call was valid."""
    if not isinstance(name, str) or name not in TOOLS:
        return f"error: no tool {name!r:.80}; there are {', '.join(TOOLS)}", False
    tool = TOOLS[name][0]
    wanted = arguments_of(tool)
    if not isinstance(arguments, Mapping) or sorted(arguments) != sorted(wanted):
        return f"error: {name} takes {', '.join(wanted)}", False
    if not all(isinstance(value, str) for value in arguments.values()):
        return "error: all arguments are text", False
    try:
        return json.dumps(tool(data, **arguments)), True
    except Refused as refused:
        return f"error: {refused}", True
