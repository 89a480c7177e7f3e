"""A Hugging Face dataset: from the hub, from files in a folder, or one that was saved to disk.

The rows stay where the library keeps them (mapped Arrow files) and are converted when they are asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from rillflow.config import SourceConfig
from rillflow.dataflow.sources.rows import CACHED, Rows, encode, optional_package, plain, prompt_id, refuse_duplicates
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt

_BATCH = 1024
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves


def open_dataset(config: SourceConfig) -> Rows:
    name = config.origin
    dataset = _one_split(name, _load(name, dict(config.arguments)))
    if config.limit is not None:
        dataset = dataset.select(range(min(config.limit, len(dataset))))
    rows = DatasetRows(name, dataset.with_format(None), config.id_key)
    rows.check()
    return rows


class DatasetRows:
    """The rows of one split, numbered from 1."""

    def __init__(self, name: str, dataset: Any, id_key: str) -> None:
        self._name, self._dataset, self._id_key = name, dataset, id_key
        self._cached = lru_cache(CACHED)(self._read)

    def check(self) -> None:
        """DataError when a row cannot be used or two have the same id."""
        encoder, hashes = msgspec.msgpack.Encoder(), array("q")
        for index, row in enumerate(self._rows()):
            prompt = self._prompt(index, row)
            encode(prompt.payload, f"{self._name}: {self.where(index)}", encoder)
            hashes.append(hash(prompt.id))
        refuse_duplicates(self._name, self, hashes)

    def where(self, index: int) -> str:
        return f"row {index + 1}"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Prompt:
        return self._cached(index)

    def _read(self, index: int) -> Prompt:
        return self._prompt(index, self._dataset[index])

    def _prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        payload = plain(row, f"{self._name}: {self.where(index)}")
        return Prompt(id=prompt_id(payload, self._id_key, index + 1), payload=payload)

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            for batch in self._dataset.iter(_BATCH):
                columns = list(batch)
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))
        except Exception as error:  # decoders of images, sound … are packages of their own
            raise _unreadable(self._name, error) from error


def _load(name: str, arguments: dict[str, Any]) -> Any:
    datasets = optional_package("datasets", "datasets")
    saved = any((Path(name) / file).is_file() for file in _SAVED)
    split = arguments.pop("split", None) if saved else None
    try:
        found = datasets.load_from_disk(name, **arguments) if saved else datasets.load_dataset(name, **arguments)
    except Exception as error:  # of the hub, of files, of arguments: many, without a common base
        raise _unreadable(name, error) from error
    if split is None:
        return found
    if not isinstance(found, dict):
        raise ConfigError(f"the dataset {name} was saved without splits", "remove data.*.arguments.split")
    return found.get(split, found)


def _one_split(name: str, found: Any) -> Any:
    datasets = optional_package("datasets", "datasets")
    if isinstance(found, datasets.Dataset):
        return found
    if isinstance(found, dict):
        raise ConfigError(
            f"the dataset {name} has several splits and one must be named: {', '.join(found)}",
            f"set data.*.arguments.split, for example {next(iter(found), 'train')}",
        )
    raise ConfigError(
        f"the dataset {name} is a stream, which has no positions to resume at",
        "remove data.*.arguments.streaming",
    )


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"the dataset {name} cannot be read: {type(error).__name__}: {error}",
        "check data.*.dataset and data.*.arguments, which are those of datasets.load_dataset",
    )
