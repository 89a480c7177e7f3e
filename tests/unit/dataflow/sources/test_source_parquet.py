"""Parquet: rows of a real file, streamed and kept on the disk."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_support import ids, opened

from rillflow.config import SourceConfig
from rillflow.errors import ConfigError, DataError
from rillflow.types import Prompt


def parquet(folder, columns, **options):
    path = folder / "rows.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=options.pop("row_group_size", 1024))
    return SourceConfig(path=str(path), **options)


def test_columns_are_keys(tmp_path):
    when = datetime(2024, 5, 6, tzinfo=UTC)
    columns = {"id": ["a", None], "n": [1, 2], "l": [[1.5], []], "s": [{"x": "y"}, None], "t": [when, None]}
    source = opened(parquet(tmp_path, columns))
    assert source.at(0) == Prompt(
        id="a", payload={"id": "a", "n": 1, "l": [1.5], "s": {"x": "y"}, "t": "2024-05-06T00:00:00+00:00"}
    )
    assert source.at(1) == Prompt(id="2", payload={"id": None, "n": 2, "l": [], "s": None, "t": None})


def test_many_groups_of_rows_in_any_order(tmp_path):
    config = parquet(tmp_path, {"uid": list(range(5000))}, id_key="uid", row_group_size=700)
    source, again = (opened(config, shuffle=True) for _ in range(2))
    assert sorted(map(int, ids(source))) == list(range(5000))
    assert ids(again, range(12_000, 12_050)) == ids(source, range(12_000, 12_050))
    assert ids(opened(config)) == [str(number) for number in range(5000)]


def test_a_limit(tmp_path):
    assert opened(parquet(tmp_path, {"q": list(range(5000))}, limit=7)).length == 7


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"q": pa.array([], pa.int64())}, "no prompts"),
        ({"id": ["a", "b", "a"]}, "row 3 has the id 'a' of row 1"),
        ({"q": [1, 2], "price": [None, Decimal("1.5")]}, "row 2 cannot be sent to a node: price is of type Decimal"),
        ({"q": [b"x"]}, "row 1 cannot be sent to a node: q is of type bytes"),
    ],
)
def test_bad_rows_are_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        opened(parquet(tmp_path, columns))


def test_bad_files(tmp_path):
    path = tmp_path / "rows.parquet"
    with pytest.raises(DataError, match="No such file"):
        opened(SourceConfig(path=str(path)))
    path.write_text('{"q": 1}\n')
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        opened(SourceConfig(path=str(path)))


def test_a_torn_file(tmp_path):
    config = parquet(tmp_path, {"q": list(range(5000))})
    data = bytearray((tmp_path / "rows.parquet").read_bytes())
    data[4:2000] = b"\xff" * 1996
    (tmp_path / "rows.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.parquet"):
        opened(config)


def test_without_the_package(tmp_path, monkeypatch):
    config = parquet(tmp_path, {"q": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError) as caught:
        opened(config)
    assert caught.value.hint == "pip install rillflow[parquet]"
