"""Secrets are found by the form of a URL and by the name of a key, and nothing else is touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from rillflow.config import load_recipe
from rillflow.config.load import FIT, read_raw, recipes
from rillflow.config.secrets import MASK, SecretFormatter, masked, missing, names_secret, unmasked, without_secrets
from rillflow.config.tracebacks import located, trace_of
from rillflow.errors import ConfigError
from rillflow.storage import write_atomic

RECIPES = sorted(name for name in recipes() if FIT not in read_raw(name, []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://me:secret@host:6379/0", "redis://host:6379/0"),
        ("redis://:p@ss@host:6379/0", "redis://host:6379/0"),
        ("redis://host:6379/0?password=secret&db=1", f"redis://host:6379/0?password={MASK}&db=1"),
        ("https://host/v1?access_token=secret#part", f"https://host/v1?access_token={MASK}#part"),
        ("https://host/v1?q=1&API-KEY=secret", f"https://host/v1?q=1&API-KEY={MASK}"),
        ("cannot reach 'redis://me:secret@host/0': refused", "cannot reach 'redis://host/0': refused"),
        ("https://me@host/x", "https://me@host/x"),
        ("https://host/x?max_tokens=5&monkey=1", "https://host/x?max_tokens=5&monkey=1"),
        ("http://[::1]:80/a:b@c", "http://[::1]:80/a:b@c"),
        ("workflow.py:play", "workflow.py:play"),
    ],
)
def test_secrets_of_urls(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


@pytest.mark.parametrize(
    "name", ["password", "HF_TOKEN", "api_key", "OPENAI_API_KEY", "X-Api-Key", "Authorization", "client-secret"]
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "tokens", "pad_token", "tokenizer", "key_variable", "keys", "monkey"])
def test_names_of_other_things(name: str) -> None:
    assert not names_secret(name)


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_that_is_shipped_is_changed(name: str) -> None:
    plain = load_recipe(name).model_dump(mode="json")
    assert masked(plain) == plain


def test_variables_are_filled_in_and_the_rest_is_left_out() -> None:
    recipe = {"a": [{"environment": {"X_TOKEN": "1", "Y_TOKEN": "2", "LEVEL": "3"}}], "headers": {"Authorization": "4"}}
    told = masked(recipe)
    assert "Y_TOKEN" in told["a"][0]["environment"]
    here = {"X_TOKEN": "mine"}
    assert unmasked(told, here) == {"a": [{"environment": {"X_TOKEN": "mine", "LEVEL": "3"}}], "headers": {}}
    assert sorted(missing(told, here)) == ["Authorization", "Y_TOKEN"]


def test_log_lines_and_tracebacks_have_no_passwords() -> None:
    try:
        raise ConnectionError("redis://me:hidden@host/0 is down")
    except ConnectionError as error:
        raised = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "lost %s", ("redis://me:hidden@host/0",), raised)
    text = SecretFormatter("%(message)s").format(record)
    assert "redis://host/0" in text
    assert "me:hidden" not in text.replace('raise ConnectionError("redis://me:hidden', "")


def test_errors_of_user_code_have_no_passwords() -> None:
    """They go to the ledger, the dashboard and the terminal."""
    with pytest.raises(ConnectionError) as caught:
        raise ConnectionError("redis://me:hidden@host/0 is down")
    assert located(caught.value).startswith("ConnectionError: redis://host/0 is down (test_secrets.py")
    assert "redis://host/0" in trace_of(caught.value)
    assert "hidden" not in trace_of(caught.value)


def test_a_wrong_value_is_told_without_its_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", ["dataflow.units.count=redis://me:hidden@host"])
    assert "hidden" not in str(caught.value)


def test_a_private_file_is_its_owners_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    replace = os.replace
    monkeypatch.setattr(
        "os.replace", lambda one, other: (modes.append(Path(one).stat().st_mode & 0o777), replace(one, other))
    )
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_atomic(path, b"new", private=True)
    assert modes == [0o600]
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
