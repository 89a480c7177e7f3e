"""Scoped tokens: what each opens, how they are made and how a service recognises them.

The token in a run's `run.json` is the operator's. The others are derived from it with HMAC-SHA256, so nothing else is
stored. The holder of a token can derive those to the right of it, and no other:

    operator ──▶ trainer
             ├─▶ stage
             ├─▶ unit
             └─▶ node ──▶ reader

A service knows the digests of the tokens (`Keyring`), not the tokens: a node on another host recognises the operator's
token without holding it. Digests need not be secret, because a token has 256 random bits.

It does not protect against a node that uses another node's name or invents episodes. Nodes are trusted with episodes;
they cannot commit a step, retire other nodes or stop the run.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import get_args

from rillflow.errors import Forbidden
from rillflow.types import TokenScope

SCOPES: tuple[TokenScope, ...] = get_args(TokenScope)

# The scopes whose routes a token opens. Every route that a reader may ask only reads.
OPENS: Mapping[TokenScope, frozenset[TokenScope]] = {
    "operator": frozenset(SCOPES),
    "trainer": frozenset({"trainer", "reader"}),
    "stage": frozenset({"stage"}),
    "unit": frozenset({"unit"}),
    "node": frozenset({"node", "reader"}),
    "reader": frozenset({"reader"}),
}


def scoped_token(token: str, scope: TokenScope) -> str:
    """Return the token of `scope` of the run whose own token, the operator's, is `token`."""
    match scope:
        case "operator":
            return token
        case "reader":
            return reader_token(scoped_token(token, "node"))
        case _:
            return _derived(token, scope)


def reader_token(node_token: str) -> str:
    """Return the reader's token, for a process that has the node's."""
    return _derived(node_token, "reader")


def _derived(token: str, scope: TokenScope) -> str:
    made = hmac.digest(token.encode(), f"rillflow token: {scope}".encode(), "sha256")
    return base64.urlsafe_b64encode(made).decode().rstrip("=")


class Keyring:
    """The digests of a run's tokens, by scope. A service that knows no token of a scope does not let it in."""

    def __init__(self, digests: Mapping[TokenScope, str]) -> None:
        self.digests = dict(digests)

    @classmethod
    def of_run(cls, token: str) -> Keyring:
        """Return the digests of all scopes of the run whose own token is `token`."""
        return cls({scope: _digest(scoped_token(token, scope)) for scope in SCOPES})

    @classmethod
    def of_reader(cls, token: str) -> Keyring:
        """Return the digest of the reader's scope alone, for a process that has only this token."""
        return cls({"reader": _digest(token)})

    def scope_of(self, presented: str) -> TokenScope | None:
        """Return the scope of a token; None for anything else. It takes the same time for every token."""
        found: TokenScope | None = None
        shown = _digest(presented)
        for scope, known in self.digests.items():
            if hmac.compare_digest(shown, known):
                found = scope
        return found


def check_scope(held: TokenScope, needs: tuple[TokenScope, ...], path: str) -> None:
    """Raise Forbidden unless a token of scope `held` opens a route that needs one of the scopes `needs`."""
    if OPENS[held].isdisjoint(needs):
        raise Forbidden(
            f"{path} needs a token of scope {' or '.join(needs)}; this one has scope {held}",
            f"`rillflow token RUN {needs[0]}` prints it, where the run's folder is",
        )


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
