"""The customers of `tau`: their wishes, what satisfies them, and a scripted customer.

A wish is made from a database: `changes` are the tool calls that lead to the wanted database, `told` lists the facts
that the customer asks for. A scripted customer recognises questions by keywords. It gives its name, agrees when asked,
and leaves when it is served, or after it had to repeat its wish too often.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass, field
from typing import Any

from rillflow.agents.environments import tau_retail as retail

WISHES = ("cancel", "address", "return", "exchange", "total", "refused")
PATIENCE = 4  # times that a customer repeats its wish
_ASKS_NAME = re.compile(r"\b(name|zip|who|identify|verify)\b", re.IGNORECASE)
_ASKS_YES = re.compile(r"\b(confirm|agree|go on|proceed|shall i|is that (right|ok)|yes)\b", re.IGNORECASE)
_BYE = re.compile(r"\b(bye|goodbye)\b", re.IGNORECASE)


@dataclass
class Wish:
    """What a customer wants; `says` is its first message."""

    kind: str
    user: str
    order: str
    says: str
    changes: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def goal(self, data: retail.Database) -> retail.Database:
        """Return the database that the customer wants."""
        wanted = copy.deepcopy(data)
        for name, arguments in self.changes:
            said, _ = retail.call(wanted, name, arguments)
            assert not said.startswith("error"), said
        return wanted


def make_wish(data: retail.Database, kind: str, draw: random.Random) -> Wish:
    user = draw.choice(sorted(data["users"]))
    status = "pending" if kind in ("cancel", "address") else "delivered"
    order = next(number for number in data["users"][user]["orders"] if data["orders"][number]["status"] == status)
    item = draw.choice(data["orders"][order]["items"])
    about = data["items"][item]
    what = f"the {about['variant']} {about['product']}"
    if kind == "cancel":
        reason = draw.choice(retail.REASONS)
        changes = [("cancel_order", {"order": order, "reason": reason})]
        return Wish(kind, user, order, f"Please cancel my order {order}, it was {reason}.", changes)
    if kind == "address":
        address = f"{draw.randrange(1, 99)} {draw.choice(retail.STREETS)}"
        changes = [("change_address", {"order": order, "address": address})]
        return Wish(kind, user, order, f"Please send my order {order} to {address}.", changes)
    if kind == "return":
        changes = [("return_item", {"order": order, "item": item})]
        return Wish(kind, user, order, f"I want to return {what} of my order {order}.", changes)
    if kind == "exchange":
        others = [
            number
            for number, other in data["items"].items()
            if other["product"] == about["product"] and number not in data["orders"][order]["items"]
        ]
        new = draw.choice(others)
        changes = [("exchange_item", {"order": order, "item": item, "new_item": new})]
        says = f"In my order {order}, please exchange {what} for the {data['items'][new]['variant']} one."
        return Wish(kind, user, order, says, changes)
    if kind == "total":
        total = sum(data["items"][number]["price"] for number in data["orders"][order]["items"])
        return Wish(kind, user, order, f"How much was my order {order} in total?", told=[str(total)])
    return Wish(kind, user, order, f"Please cancel my order {order}, it was ordered by mistake.", told=["delivered"])


class ScriptedCustomer:
    """A customer that follows a script. `left` says that it has gone."""

    def __init__(self, wish: Wish, user: dict[str, Any]) -> None:
        self._wish = wish
        self._user = user
        self._repeated = 0
        self.left = False

    def answer(self, text: str, *, served: bool) -> str:
        """Return the answer to the agent's text; `served` says whether the wish is fulfilled."""
        if served:
            self.left = True
            return "Thank you, that is all."
        if _BYE.search(text):
            self.left = True
            return "Bye."
        if _ASKS_NAME.search(text):
            return f"I am {self._user['name']}, zip code {self._user['zip']}."
        if _ASKS_YES.search(text):
            return "Yes."
        self._repeated += 1
        if self._repeated > PATIENCE:
            self.left = True
            return "This leads nowhere. Bye."
        return self._wish.says


def briefing(wish: Wish, user: dict[str, Any]) -> str:
    """Return the instructions for a role that plays this customer."""
    return (
        f"You are {user['name']}, zip code {user['zip']}, a customer of a shop, writing to its service desk. What you "
        f"want: {wish.says} Say only what you are asked for, in one short sentence. Agree when you are asked whether "
        "to go on with what you want. When you have what you want, or it was refused for good, say END."
    )
