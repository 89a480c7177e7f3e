"""Where prompts come from. A source is read whole and checked when the run starts, so a bad row ends no run midway.

`at(index)` is pure: the same index of the endless sequence of epochs gives the same prompt in every process, so a
cursor is all that a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rillflow.config import SourceConfig, resolve_object
from rillflow.contracts import PromptSource
from rillflow.dataflow.rules import derive_seed
from rillflow.errors import DataError, RillflowError
from rillflow.types import Prompt


class InOrder:
    """The prompts as they stand, epoch after epoch."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        return self._prompts[index % len(self._prompts)]


class Shuffled:
    """A new order every epoch, fixed by the seed."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._permutation)

    @property
    def length(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self._prompts))
        return self._prompts[self._order(epoch)[place]]

    def _permutation(self, epoch: int) -> list[int]:
        # RandomState's stream is frozen for good: another numpy gives the same order.
        generator = np.random.RandomState(derive_seed(self._seed, "order", epoch) & 0xFFFFFFFF)
        order: list[int] = generator.permutation(len(self._prompts)).tolist()
        return order


def open_source(config: SourceConfig, *, seed: int, shuffle: bool) -> PromptSource:
    """The source that a recipe describes; DataError when it cannot be used."""
    prompts = list(_checked(_read(config), _name(config)))
    if not prompts:
        raise DataError(f"{_name(config)} has no prompts", "give at least one")
    return Shuffled(prompts, seed) if shuffle else InOrder(prompts)


def _name(config: SourceConfig) -> str:
    return config.path or config.generator or ""


def _read(config: SourceConfig) -> Iterator[tuple[str, Prompt]]:
    """Pairs of where a prompt was found and the prompt."""
    rows = _from_file(Path(config.path), config.id_key) if config.path else _from_generator(config)
    return islice(rows, config.limit)


def _checked(rows: Iterable[tuple[str, Prompt]], name: str) -> Iterator[Prompt]:
    seen: dict[str, str] = {}
    for where, prompt in rows:
        if prompt.id in seen:
            raise DataError(
                f"{name}: {where} has the id {prompt.id!r} of {seen[prompt.id]}", "give every prompt its own id"
            )
        seen[prompt.id] = where
        try:
            msgspec.msgpack.encode(prompt.payload)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{name}: {where} cannot be sent to a node: {error}", "keep payloads to what JSON can say"
            ) from error
        yield prompt


# ---------------------------------------------------------------- JSONL


def _from_file(path: Path, id_key: str) -> Iterator[tuple[str, Prompt]]:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"cannot read the prompts {path}: {error.strerror}", "check data.*.path") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", _prompt_of_line(path, number, line, id_key)


def _prompt_of_line(path: Path, number: int, line: bytes, id_key: str) -> Prompt:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: line {number} is not valid JSON: {error}", "one JSON object a line") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}: line {number} is a {type(row).__name__}, not an object", "one JSON object a line")
    return Prompt(id=str(row.get(id_key, number)), payload=row)


# ---------------------------------------------------------------- generator


def _from_generator(config: SourceConfig) -> Iterator[tuple[str, Prompt]]:
    name = config.generator or ""
    function = resolve_object(name)
    try:
        for number, item in enumerate(function(**config.arguments), start=1):
            yield f"item {number}", _prompt_of_item(name, number, item)
    except RillflowError:
        raise
    except Exception as error:
        raise DataError(
            f"the generator {name} raised {type(error).__name__}: {error}", "check data.*.arguments and the function"
        ) from error


def _prompt_of_item(name: str, number: int, item: Any) -> Prompt:
    if isinstance(item, dict) and set(item) == {"id", "payload"} and isinstance(item["payload"], dict):
        return Prompt(id=str(item["id"]), payload=item["payload"])
    raise DataError(
        f"{name}: item {number} is {item!r:.80}",
        'a generator yields {"id": text, "payload": object}',
    )
