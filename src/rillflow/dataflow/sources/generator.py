"""A function of the user that yields prompts. It must yield the same ones each time: a resumed run calls it again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rillflow.config import SourceConfig, resolve_object
from rillflow.dataflow.sources.rows import Rows
from rillflow.dataflow.sources.stored import spooled
from rillflow.errors import DataError, RillflowError

_MOST = 10_000_000


def open_generator(config: SourceConfig) -> Rows:
    assert config.generator is not None
    return spooled(config.generator, "item", islice(_items(config.generator, config.arguments), config.limit))


def _items(name: str, arguments: dict[str, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    function = resolve_object(name)
    try:
        for number, item in enumerate(function(**arguments), start=1):
            if number > _MOST:
                raise DataError(f"{name} yields more than {_MOST} prompts", "is it endless? set data.*.limit")
            yield _identified(name, number, item)
    except RillflowError:
        raise
    except Exception as error:
        raise DataError(
            f"the generator {name} raised {type(error).__name__}: {error}", "check data.*.arguments and the function"
        ) from error


def _identified(name: str, number: int, item: Any) -> tuple[str, dict[Any, Any]]:
    if isinstance(item, dict) and set(item) == {"id", "payload"} and isinstance(item["payload"], dict):
        return str(item["id"]), item["payload"]
    raise DataError(f"{name}: item {number} is {item!r:.80}", 'a generator yields {"id": text, "payload": object}')
