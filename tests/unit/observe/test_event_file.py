"""Event files are read by TensorBoard's own message classes, with the right checksums."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from rillflow.observe.trackers.services import EventFile, _crc32c, _varint


def records(path: Path) -> list[bytes]:
    content, found = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        assert content[8:12] == masked(content[:8])
        message = content[12 : 12 + size]
        assert content[12 + size : 16 + size] == masked(message)
        found.append(message)
        content = content[16 + size :]
    return found


def masked(content: bytes) -> bytes:
    from tensorboardX.crc32c import crc32c

    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    file = EventFile(tmp_path / "made" / "here")
    file.add("agent/reward", 0.25, 300, 12.5)
    file.add("a name: ü", -1e30, 0, 0.0)
    file.flush()
    file.add("loss", float("nan"), -1, 2.0)
    file.flush()
    file.close()
    (path,) = (tmp_path / "made" / "here").iterdir()
    assert "tfevents" in path.name
    first, *rest = [Event.FromString(record) for record in records(path)]
    assert first.file_version == "brain.Event:2"
    values = [(e.summary.value[0].tag, e.summary.value[0].simple_value, e.step, e.wall_time) for e in rest]
    assert values[0] == ("agent/reward", 0.25, 300, 12.5)
    assert values[1][0] == "a name: ü"
    assert values[1][1] == pytest.approx(-1e30, rel=1e-6)
    assert values[2][1] != values[2][1]
    assert values[2][2] == -1


def test_checksums_and_numbers_of_the_specifications() -> None:
    assert _crc32c(b"123456789") == 0xE3069283
    assert _crc32c(bytes(32)) == 0x8A9136AA
    assert _varint(0) == b"\x00"
    assert _varint(300) == b"\xac\x02"
