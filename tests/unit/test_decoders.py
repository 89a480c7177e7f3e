"""Structs are decoded by decoders that were built once: threads that decode one for the first time at once crash."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import rillflow
from rillflow.types import Row
from rillflow.types.base import json_decoder, msgpack_decoder

SOURCES = sorted(Path(rillflow.__file__).parent.rglob("*.py"))
PLAIN = {"Any", "bool", "bytes", "dict", "float", "int", "list", "str", "tuple"}


def _structs_decoded_by_type(path: Path) -> list[int]:
    """Lines that call `msgspec.….decode(…, type=…)` with anything but plain types."""
    text = path.read_text()
    if not re.search(r"msgspec\.\w+\.decode\([^)]*type=", text):
        return []  # most files, which need not be parsed
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    decodes = [call for call in calls if ast.unparse(call.func) in ("msgspec.json.decode", "msgspec.msgpack.decode")]
    kinds = [(call.lineno, word.value) for call in decodes for word in call.keywords if word.arg == "type"]
    return [line for line, kind in kinds if {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)} - PLAIN]


def test_no_struct_is_decoded_without_a_decoder() -> None:
    found = {str(path): lines for path in SOURCES if (lines := _structs_decoded_by_type(path))}
    assert found == {}, "use rillflow.types.base, or a decoder that is built when the module is imported"


def test_a_decoder_is_built_once() -> None:
    assert json_decoder(Row) is json_decoder(Row)
    assert msgpack_decoder(Row) is msgpack_decoder(Row)
