"""The customers of `tau`: what each wants, what would satisfy it, and how one speaks that follows a script.

A wish is made from a database: `changes` are the tool calls that lead to the database that it wants, `told` what it
has to be told. A scripted customer answers what it is asked for, as far as words tell; it says yes when it is asked to
agree, and leaves when it is served, or when it was asked nothing that it can answer too often.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass, field
from typing import Any

from rillflow.agents.environments import tau_retail as retail

WISHES = ("cancel", "address", "return", "exchange", "total", "refused")
PATIENCE = 4  # times that it says its wish again
_ASKS_NAME = re.compile(r"\b(name|zip|who|identify|verify)\b", re.IGNORECASE)
_ASKS_YES = re.compile(r"\b(confirm|agree|go on|proceed|shall i|is that (right|ok)|yes)\b", re.IGNORECASE)
_BYE = re.compile(r"\b(bye|goodbye)\b", re.IGNORECASE)


@dataclass
class Wish:
    """`says` is the first thing that the customer says."""

    kind: str
    user: str
    order: str
    says: str
    changes: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def goal(self, data: retail.Database) -> retail.Database:
        """The database that the customer wants."""
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
    """Says what it is asked for. `left` once it has gone."""

    def __init__(self, wish: Wish, user: dict[str, Any]) -> None:
        self._wish = wish
        self._user = user
        self._repeated = 0
        self.left = False

    def answer(self, text: str, *, served: bool) -> str:
        """To what the agent said; `served` is whether it has all that it wanted."""
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
    """What somebody has to know who plays this customer."""
    return (
        f"You are {user['name']}, zip code {user['zip']}, a customer of a shop, writing to its service desk. What you "
        f"want: {wish.says} Say only what you are asked for, in one short sentence. Agree when you are asked whether "
        "to go on with what you want. When you have what you want, or it was refused for good, say END."
    )
