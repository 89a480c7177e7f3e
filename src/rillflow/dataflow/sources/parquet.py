"""A Parquet file, read in batches of rows: never more than one batch is in memory.

Parquet has no access to a single row (a whole group of rows is decoded for it), so the rows are spooled.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rillflow.config import SourceConfig
from rillflow.dataflow.sources.rows import Rows, optional_package, prompt_id
from rillflow.dataflow.sources.stored import spooled
from rillflow.errors import DataError

SUFFIXES = (".parquet", ".pq")
_BATCH = 1024


def open_parquet(config: SourceConfig) -> Rows:
    assert config.path is not None
    rows = enumerate(islice(_rows(config.path), config.limit), start=1)
    return spooled(config.path, "row", ((prompt_id(row, config.id_key, number), row) for number, row in rows))


def _rows(path: str) -> Iterator[dict[str, Any]]:
    parquet = optional_package("pyarrow.parquet", "parquet")
    try:
        with open(path, "rb") as file:
            for batch in parquet.ParquetFile(file).iter_batches(_BATCH):
                yield from batch.to_pylist()
    except OSError as error:
        raise DataError(f"cannot read the prompts {path}: {error.strerror or error}", "check data.*.path") from error
    except Exception as error:  # pyarrow's own, without a common base
        raise DataError(f"{path} cannot be read as Parquet: {error}", "check the file; JSONL ends in .jsonl") from error
