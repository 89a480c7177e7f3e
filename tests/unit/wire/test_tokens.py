"""Scoped tokens: each is derived from those above it, and opens what its scope says."""

from __future__ import annotations

import pytest

from rillflow.errors import Forbidden
from rillflow.types import TokenScope
from rillflow.wire.tokens import OPENS, SCOPES, Keyring, check_scope, reader_token, scoped_token

RUN = "the run's own token"


def test_the_tokens_of_a_run_differ_and_are_the_same_every_time() -> None:
    tokens = [scoped_token(RUN, scope) for scope in SCOPES]
    assert len(set(tokens)) == len(SCOPES)
    assert tokens == [scoped_token(RUN, scope) for scope in SCOPES]
    assert not set(tokens) & {scoped_token("another run", scope) for scope in SCOPES}


def test_the_operator_has_the_runs_own_token_and_a_node_makes_the_readers() -> None:
    assert scoped_token(RUN, "operator") == RUN
    assert reader_token(scoped_token(RUN, "node")) == scoped_token(RUN, "reader")


def test_a_keyring_recognises_tokens_without_having_them() -> None:
    keyring = Keyring.of_run(RUN)
    for scope in SCOPES:
        token = scoped_token(RUN, scope)
        assert keyring.scope_of(token) == scope
        assert token not in str(keyring.digests)
    for stranger in ("", "x", RUN + " ", scoped_token("another run", "node"), keyring.digests["node"], "é"):
        assert keyring.scope_of(stranger) is None


def test_a_relay_knows_the_readers_token_only() -> None:
    keyring = Keyring.of_reader(scoped_token(RUN, "reader"))
    assert [scope for scope in SCOPES if keyring.scope_of(scoped_token(RUN, scope))] == ["reader"]


@pytest.mark.parametrize("held", SCOPES)
def test_only_the_operator_has_more_than_its_own_and_what_readers_have(held: TokenScope) -> None:
    own = {held} if held in ("stage", "unit") else {held, "reader"}
    assert OPENS[held] == (set(SCOPES) if held == "operator" else own)


def test_a_refusal_says_which_scope_is_needed() -> None:
    check_scope("trainer", ("node", "trainer"), "/units")
    with pytest.raises(Forbidden, match="/stop needs a token of scope operator; this one has scope node") as caught:
        check_scope("node", ("operator",), "/stop")
    assert "rillflow token RUN operator" in caught.value.hint
