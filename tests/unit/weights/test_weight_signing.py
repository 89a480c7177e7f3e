"""Signatures: whatever was changed on the way, or is not of this run, is refused by who has the key."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rillflow.errors import CorruptData
from rillflow.weights.manifest import (
    Entry,
    Line,
    TensorFacts,
    VersionManifest,
    check_signature,
    key_of,
    parse_line,
    parse_manifest,
    signed,
)
from rillflow.weights.sealed import FileFacts, as_text

KEY = key_of("the run's token")
LINE = Line(head=11, orphaned=frozenset({9, 10, 3}), entries={11: Entry(full_bytes=5), 2: Entry(delta_of=1)})
MANIFEST = VersionManifest(
    files={"model.safetensors": FileFacts("ab", 7)},
    version=11,
    parent=8,
    created=1234.5678,
    tensors={"b": TensorFacts("bfloat16", [2, 3]), "a": TensorFacts("bfloat16", [1])},
    aliases={"c": "a"},
    fingerprints={"a": "0123456789abcdef", "b": "00000000000000ff"},
)


def test_what_is_signed_is_accepted_after_a_journey() -> None:
    assert parse_line(as_text(signed(LINE, KEY)), KEY, "it") == signed(LINE, KEY)
    assert parse_manifest(as_text(signed(MANIFEST, KEY)), 11, KEY, "it") == signed(MANIFEST, KEY)


def test_the_order_of_keys_does_not_matter() -> None:
    text = json.loads(as_text(signed(MANIFEST, KEY)))
    turned = json.dumps(dict(reversed(text.items())) | {"tensors": dict(reversed(text["tensors"].items()))})
    parse_manifest(turned.encode(), 11, KEY, "it")


@pytest.mark.parametrize(
    "lie",
    [
        {"head": 10},
        {"orphaned": [9, 10]},
        {"entries": {"11": {"full_bytes": 6}}},
        {"signature": ""},
        {"signature": "0" * 64},
        {"signature": "ä"},
    ],
)
def test_a_line_that_was_changed_is_refused(lie: dict[str, Any]) -> None:
    data = json.dumps(json.loads(as_text(signed(LINE, KEY))) | lie).encode()
    with pytest.raises(CorruptData, match="is not signed"):
        parse_line(data, KEY, "the head")
    parse_line(data, b"", "the head")


@pytest.mark.parametrize("field", ["version", "parent", "created", "files", "tensors", "aliases", "fingerprints"])
def test_every_field_of_a_manifest_is_signed(field: str) -> None:
    other = {"version": 12, "parent": 3, "created": 1.0, "files": {}, "tensors": {}, "aliases": {}, "fingerprints": {}}
    changed = msgspec.structs.replace(signed(MANIFEST, KEY), **{field: other[field]})
    with pytest.raises(CorruptData, match="not signed with this run's key"):
        check_signature(changed, KEY, "it")


def test_another_runs_key_is_refused() -> None:
    with pytest.raises(CorruptData, match="not signed with this run's key"):
        check_signature(signed(LINE, key_of("another token")), KEY, "it")


def test_no_token_is_no_key() -> None:
    assert key_of("") == b""
    assert signed(LINE, b"") == LINE
    check_signature(LINE, b"", "it")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"head": 1, "orphaned": [], "signature": "\xf2\x28"}',
        b"[1]",
        b'{"head": "zero", "orphaned": []}',
        b'{"head": 1, "orphaned": [], "entries": {"x": {}}}',
    ],
)
def test_what_is_no_line_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptData):
        parse_line(data, b"", "it")


@pytest.mark.parametrize("name", ["../model", "/etc/hostname", ".hidden", "a/b", ""])
def test_a_manifest_names_plain_files_only(name: str) -> None:
    odd = signed(msgspec.structs.replace(MANIFEST, files={name: FileFacts("ab", 7)}), KEY)
    with pytest.raises(CorruptData, match="invalid names"):
        parse_manifest(as_text(odd), 11, KEY, "it")


def test_a_manifest_of_another_version_is_refused() -> None:
    with pytest.raises(CorruptData, match="belongs to version 11"):
        parse_manifest(as_text(signed(MANIFEST, KEY)), 12, KEY, "it")


@pytest.mark.parametrize("digits", ["xyz", "0", "0123456789ABCDEF", "0123456789abcdef0"])
def test_fingerprints_have_sixteen_digits(digits: str) -> None:
    data = as_text(MANIFEST).replace(b"0123456789abcdef", digits.encode())
    with pytest.raises(CorruptData):
        parse_manifest(data, 11, b"", "it")
