"""Secrets in recipes and texts: where they are left out, and how a node fills them in again.

A secret is the password of a URL, a query parameter or a recipe key whose name says so, an environment variable or a
header whose name says so. A recipe that leaves the run's host has `MASK` instead; variables are taken from the
environment of the process that joins. A value that refers to a variable (`${NAME}`) is not a secret. This does not find
a secret under a harmless name, or in the middle of a command line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
_NAMES = r"password|passwd|secret|token|api[-_]?key|access[-_]?key|auth|authorization|key|signature|sig"
_USER = re.compile(r"(?<=://)[^/\s?#'\"]*:[^/\s?#'\"]*@")
_PARAMETER = re.compile(rf"([?&](?:[\w.-]*[_.-])?(?:{_NAMES})=)[^&#\s'\"]+", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{\w+\}")
_SECRET = frozenset({"password", "passwd", "secret", "token", "apikey", "credential", "credentials", "authorization"})
_KEYS = ("api_key", "access_key", "private_key", "secret_key")
_TOKENS_OF_TEXT = frozenset({"bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop"})  # as in `pad_token`


def without_secrets(text: str) -> str:
    """Return a text without the passwords and secret parameters of the URLs in it."""
    return _PARAMETER.sub(rf"\1{MASK}", _USER.sub("", text)) if "://" in text else text


def names_secret(name: str) -> bool:
    """Return whether the value of a key, variable or header of this name is a secret."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if _TOKENS_OF_TEXT & set(words):
        return False
    return bool(_SECRET & set(words)) or any(key in "_".join(words) for key in _KEYS)


def masked(value: Any, name: str = "") -> Any:
    """Return a recipe, or a part of one under the key `name`, without its secrets."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if isinstance(value, str):
        secret = value and names_secret(name) and not _REFERENCE.search(value)
        return MASK if secret else without_secrets(value)
    return value


def unmasked(value: Any, environment: Mapping[str, str]) -> Any:
    """Return a masked recipe with the variables that this `environment` has. Values that are still masked are left
    out."""
    if isinstance(value, Mapping):
        filled = {key: environment.get(str(key), MASK) if inner == MASK else inner for key, inner in value.items()}
        return {key: unmasked(inner, environment) for key, inner in filled.items() if inner != MASK}
    if isinstance(value, list | tuple):
        return [unmasked(inner, environment) for inner in value]
    return value


def missing(value: Any, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the names under which a masked recipe has secrets that this `environment` does not have."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner == MASK and str(key) not in environment:
                yield str(key)
            yield from missing(inner, environment)
    if isinstance(value, list | tuple):
        for inner in value:
            yield from missing(inner, environment)


class SecretFormatter(logging.Formatter):
    """Formats log records, tracebacks included, without secrets of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
