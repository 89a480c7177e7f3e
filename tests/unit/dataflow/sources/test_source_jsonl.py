"""JSONL: rows are payloads and stay on the disk; bad files say what is wrong and where."""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
from source_support import ids, jsonl, opened

from rillflow.config import SourceConfig
from rillflow.errors import DataError
from rillflow.types import Prompt


def test_rows_are_payloads_and_ids_come_from_their_key_or_line(tmp_path):
    source = opened(jsonl(tmp_path, {"id": "a", "q": 1}, b"\n", {"q": 2}, {"id": None, "q": 3}))
    assert source.length == 3
    assert source.at(0) == Prompt(id="a", payload={"id": "a", "q": 1})
    assert source.at(1) == Prompt(id="3", payload={"q": 2})
    assert source.at(2).id == "4"
    assert source.at(3) == source.at(0)


def test_another_id_key_and_a_limit(tmp_path):
    source = opened(jsonl(tmp_path, {"name": 7}, {"name": 8}, b"not even JSON", id_key="name", limit=2))
    assert ids(source) == ["7", "8"]


def test_a_last_line_without_its_end(tmp_path):
    assert opened(jsonl(tmp_path, {"q": 1}, b'{"q": 2}')).at(1).payload == {"q": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no prompts"),
        ([b"\n\n"], "no prompts"),
        ([{"q": 1}, b'{"q": \n'], "line 2 is not valid JSON"),
        ([b"\xff\xfe{}\n"], "line 1 is not valid JSON"),
        ([b'{"q": NaN}\n'], "line 1 is not valid JSON"),
        ([b"[" * 100_000 + b"\n"], "line 1 is not valid JSON"),
        ([{"q": 1}, [1, 2]], "line 2 is a list, not an object"),
        ([{"id": "x"}, {"id": "y"}, {"id": "x"}], "line 3 has the id 'x' of line 1"),
        ([{"id": "2"}, {"q": 1}], "line 2 has the id '2' of line 1"),
        ([{"q": 1}, {"q": 2**70}], "line 2 cannot be sent to a node"),
    ],
)
def test_bad_files_name_the_line(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as caught:
        opened(jsonl(tmp_path, *lines))
    assert caught.value.hint


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        opened(SourceConfig(path=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match="Is a directory"):
        opened(SourceConfig(path=str(tmp_path)))


def test_a_file_put_in_its_place_changes_nothing(tmp_path):
    source = opened(jsonl(tmp_path, {"id": "a", "q": 1}))
    new = jsonl(tmp_path, {"id": "a", "q": 2}, file="new.jsonl")
    os.replace(new.path, tmp_path / "prompts.jsonl")
    assert source.at(0).payload["q"] == 1


@pytest.mark.parametrize("line", [b'{"id": "b", "q": 2}\n', b'{"id": "a", "q": 2}\n', b"{}", b""])
def test_an_overwritten_row_is_noticed(tmp_path, line):
    source = opened(jsonl(tmp_path, {"id": "a", "q": 1}))
    (tmp_path / "prompts.jsonl").write_bytes(line)
    with pytest.raises(DataError, match=r"line 1 was overwritten") as caught:
        source.at(0)
    assert "resume" in caught.value.hint


def test_rows_that_are_added_later_change_nothing(tmp_path):
    source = opened(jsonl(tmp_path, {"id": "a"}))
    with open(tmp_path / "prompts.jsonl", "ab") as file:
        file.write(b'{"id": "b"}\n')
    assert (source.length, source.at(0).id) == (1, "a")


def test_rows_are_not_kept_in_memory(tmp_path):
    rows, size = 2_000, 4_000
    config = jsonl(tmp_path, *({"q": f"{number:0{size}}"} for number in range(rows)))
    tracemalloc.start()
    try:
        source = opened(config, shuffle=True)
        assert len({source.at(place).payload["q"] for place in range(rows)}) == rows
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < rows * size / 4


def test_files_are_closed_with_their_source(tmp_path):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    sources = [opened(jsonl(tmp_path, {"q": 1})) for _ in range(5)]
    assert descriptors() == before + 5
    del sources
    assert descriptors() == before
