"""Joining a run by its URL: whatever is wrong is one clear error before anything is started."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rillflow import __version__
from rillflow.clients import joining
from rillflow.clients.dataflow import reached_by
from rillflow.clients.joining import TOKEN_VARIABLE, join, token_of
from rillflow.config import load_recipe, write_resolved
from rillflow.errors import ConfigError, RunError
from rillflow.types import RunRecipe
from rillflow.types.routes import Updates
from rillflow.weights.updates import Invitation
from rillflow.wire import Service
from rillflow.wire.tokens import SCOPES, Keyring, scoped_token

TOKEN = "t" * 32
KEYRING = Keyring.of_run(TOKEN)


class Inviting(Service):
    """Tells its answers one after the other, the last one again and again."""

    def __init__(self, *answers: RunRecipe) -> None:
        super().__init__("dataflow", TOKEN)
        self.answers = list(answers)
        self.on(Updates.recipe, self._told)

    async def _told(self) -> RunRecipe:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@asynccontextmanager
async def inviting(*answers: RunRecipe) -> AsyncIterator[str]:
    service = Inviting(*answers)
    url = await service.start()
    try:
        yield url
    finally:
        await service.stop()


def told(*overrides: str, **change: Any) -> RunRecipe:
    recipe = load_recipe("quickstart", overrides).model_dump(mode="json")
    plain = {"recipe": recipe, "version": __version__, "weights": "http://w:1", "folder": "/not/here"}
    return RunRecipe(**plain | {"digests": KEYRING.digests} | change)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_LOOK", 0.01)


async def test_recipe_and_weights_come_from_the_service(tmp_path):
    async with inviting(told()) as url:
        joined = await join(url + "/", TOKEN, tmp_path)
    assert joined.recipe.name == "quickstart"
    assert joined.recipe.policies["agent"].weights.source == "http://w:1"
    assert joined.weights == tmp_path / "weights"
    assert joined.url == url


async def test_a_run_of_several_ledgers_is_joined_at_all_of_them(tmp_path):
    urls = ["http://0.0.0.0:1", "http://far:2"]
    async with inviting(told("dataflow.ledgers=2", ledgers=urls)) as url:
        joined = await join(url, TOKEN, tmp_path)
        unit = await join(url, TOKEN, tmp_path, scope="unit")
    assert joined.url == "http://127.0.0.1:1,http://far:2"
    assert unit.url == url, "it keeps rows of the ledger that it was sent to"
    async with inviting(told("dataflow.ledgers=2")) as url:
        with pytest.raises(RunError, match="not all ledgers"):
            await join(url, TOKEN, tmp_path)


async def test_where_the_ledgers_listen_is_told_once_all_do(tmp_path):
    recipe = load_recipe("quickstart", ["dataflow.ledgers=2"])
    invitation = Invitation(recipe, tmp_path, KEYRING)
    (tmp_path / "endpoints").mkdir()
    for process, expected in (("dataflow", []), ("dataflow-1", ["http://dataflow", "http://dataflow-1"])):
        (tmp_path / "endpoints" / f"{process}.json").write_text(json.dumps({"url": f"http://{process}"}))
        assert invitation.answer().ledgers == expected


async def test_a_source_of_its_own_is_kept(tmp_path):
    async with inviting(told("policies.agent.weights.source=http://relay:2", weights="")) as url:
        joined = await join(url, TOKEN, tmp_path)
    assert joined.recipe.policies["agent"].weights.source == "http://relay:2"


async def test_the_runs_own_folder_is_read_where_it_is_on_this_host(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"token": TOKEN}))
    async with inviting(told(weights="", folder=str(tmp_path))) as url:
        joined = await join(url, TOKEN, tmp_path / "cache")
    assert joined.weights == tmp_path / "weights"
    assert joined.recipe.policies["agent"].weights.source is None


@pytest.mark.parametrize("content", ['{"token": "another"}', "{}", "[]", "no json"])
async def test_the_folder_of_another_run_at_the_same_path_is_not(tmp_path, content):
    (tmp_path / "weights").mkdir()
    (tmp_path / "run.json").write_text(content)
    assert not joining.is_here(tmp_path, TOKEN)


async def test_without_a_weight_server_it_says_how_to_have_one(tmp_path):
    async with inviting(told(weights="")) as url:
        with pytest.raises(RunError, match="serves no weights") as caught:
            await join(url, TOKEN, tmp_path)
    assert "runtime.weights_server=true" in caught.value.hint


async def test_a_weight_server_that_is_just_starting_is_waited_for(tmp_path):
    wanted = "runtime.weights_server=true"
    async with inviting(told(wanted, weights=""), told(wanted, weights=""), told(wanted)) as url:
        joined = await join(url, TOKEN, tmp_path)
    assert joined.recipe.policies["agent"].weights.source == "http://w:1"


async def test_a_weight_server_that_never_comes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "WEIGHTS", 0.05)
    async with inviting(told("runtime.weights_server=true", weights="")) as url:
        with pytest.raises(RunError, match="has not started its weight server yet"):
            await join(url, TOKEN, tmp_path)


async def test_a_wrong_token(tmp_path):
    async with inviting(told()) as url:
        with pytest.raises(RunError, match="does not take this token"):
            await join(url, "wrong", tmp_path)


@pytest.mark.parametrize("scope", ["trainer", "stage", "unit"])
async def test_a_process_of_another_scope_has_its_own_token_and_needs_no_weights(tmp_path, scope):
    async with inviting(told(weights="")) as url:
        joined = await join(url, TOKEN, tmp_path, scope=scope)
    assert joined.token == scoped_token(TOKEN, scope)
    assert joined.recipe.policies["agent"].weights.source is None


async def test_a_token_of_another_scope_is_refused_by_name(tmp_path):
    async with inviting(told()) as url:
        with pytest.raises(RunError, match="this token has scope node, and stage is needed here") as caught:
            await join(url, scoped_token(TOKEN, "node"), tmp_path, scope="stage")
    assert "`rillflow token RUN stage`" in caught.value.hint


async def test_a_trainer_that_serves_its_own_weights_is_their_source(tmp_path):
    async with inviting(told(weights="", trainers={"agent": "http://t:3"})) as url:
        joined = await join(url, TOKEN, tmp_path)
    assert joined.recipe.policies["agent"].weights.source == "http://t:3"


async def test_weights_of_each_policy_need_a_source(tmp_path):
    async with inviting(told("policies.other.model=tiny", weights="", trainers={"agent": "http://t:3"})) as url:
        with pytest.raises(RunError, match="serves no weights"):
            await join(url, TOKEN, tmp_path)


async def test_no_service(tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "REACHED", 0.2)
    with pytest.raises(RunError, match="no run answers at http"):
        await join("http://127.0.0.1:9", TOKEN, tmp_path)


@pytest.mark.parametrize("url", ["", "10.0.0.5:8000", "ftp://host", "http://", "http://host:port", "runs/quickstart"])
async def test_what_is_no_url(tmp_path, url):
    with pytest.raises(ConfigError, match="is not the URL of a run"):
        await join(url, TOKEN, tmp_path)


async def test_another_version_of_rillflow(tmp_path):
    recipe = told().recipe | {"rollout": {"from_the_future": 1}}
    async with inviting(told(recipe=recipe, version="9.9.9")) as url:
        with pytest.raises(RunError, match="from_the_future") as caught:
            await join(url, TOKEN, tmp_path)
    assert f"the run is of Rillflow 9.9.9, this is {__version__}" in caught.value.hint


SECRETS = [
    "dataflow.units.redis=redis://host:6379/0?password=hidden-1&db=2",
    "command={run: python agent.py, environment: {SEARCH_API_KEY: hidden-2, LEVEL: high}}",
]


@pytest.mark.parametrize("known", [False, True])
async def test_secrets_do_not_travel_and_variables_come_from_where_a_node_runs(tmp_path, monkeypatch, caplog, known):
    monkeypatch.delenv("SEARCH_API_KEY", raising=False)
    if known:
        monkeypatch.setenv("SEARCH_API_KEY", "of this host")
    recipe = load_recipe("command_agent", SECRETS)
    answer = Invitation(recipe, tmp_path, KEYRING).answer()
    assert "hidden" not in str(answer)
    async with inviting(msgspec.structs.replace(answer, folder="/nowhere", weights="http://w:1")) as url:
        joined = await join(url, TOKEN, tmp_path)
    assert joined.recipe.command.environment == {"LEVEL": "high"} | (
        {"SEARCH_API_KEY": "of this host"} if known else {}
    )
    assert ("SEARCH_API_KEY" in caplog.text) is not known


async def test_a_node_on_the_host_of_the_run_reads_its_secrets(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"token": TOKEN}))
    recipe = load_recipe("quickstart", SECRETS[:1])
    write_resolved(recipe, tmp_path / "recipe.yaml")
    async with inviting(Invitation(recipe, tmp_path, KEYRING).answer()) as url:
        joined = await join(url, TOKEN, tmp_path / "cache")
    assert joined.recipe == recipe


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("scope", ["operator", "node"])
async def test_a_process_that_joins_works_with_the_nodes_token(tmp_path, scope):
    async with inviting(told()) as url:
        joined = await join(url, scoped_token(TOKEN, scope), tmp_path)
    assert joined.token == scoped_token(TOKEN, "node")
    assert joined.keyring.scope_of(TOKEN) == "operator"


@pytest.mark.parametrize("scope", ["trainer", "reader"])
async def test_a_token_of_another_scope_does_not_join(tmp_path, scope):
    async with inviting(told()) as url:
        with pytest.raises(
            RunError, match=r"needs a token of scope node|has scope trainer, and node is needed"
        ) as caught:
            await join(url, scoped_token(TOKEN, scope), tmp_path)
    assert "rillflow token RUN node" in caught.value.hint


def test_the_token_is_in_a_file_or_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, " one\n")
    assert token_of(None) == "one"
    (tmp_path / "token").write_text("two\n")
    assert token_of(tmp_path / "token") == "two"


def test_no_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="no token of the run"):
        token_of(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        token_of(tmp_path / "missing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        token_of(tmp_path / "empty")


# ---------------------------------------------------------------- what a run tells


def test_an_invitation_tells_no_token(tmp_path: Path):
    said = str(Invitation(load_recipe("quickstart"), tmp_path, KEYRING).answer())
    assert not [scope for scope in SCOPES if scoped_token(TOKEN, scope) in said]


def test_an_invitation_has_no_password_and_knows_the_weight_server_once_it_listens(tmp_path: Path):
    recipe = load_recipe("quickstart", ["dataflow.units.redis=redis://me:secret@host:6379/0"])
    invitation = Invitation(recipe, tmp_path, KEYRING)
    assert invitation.answer().recipe["dataflow"]["units"]["redis"] == "redis://host:6379/0"
    assert invitation.answer().weights == ""
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "weights.json").write_text("not yet")
    assert invitation.answer().weights == ""
    (tmp_path / "endpoints" / "weights.json").write_text('{"url": "http://w:1", "pid": 1}')
    assert invitation.answer().weights == "http://w:1"
    assert invitation.answer().folder == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "service", "reached"),
    [
        ("http://10.0.0.7:81", "http://10.0.0.5:80", "http://10.0.0.7:81"),
        ("http://0.0.0.0:81", "http://10.0.0.5:80", "http://10.0.0.5:81"),
        ("http://[::]:81", "http://[fe80::1]:80", "http://[fe80::1]:81"),
        ("", "http://10.0.0.5:80", ""),
    ],
)
def test_who_listens_on_all_addresses_is_looked_for_at_the_services_own(url, service, reached):
    assert reached_by(url, service) == reached
