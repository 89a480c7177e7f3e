"""The one place that touches disks: atomic files, hashes, append-only checksummed segments."""

from rillflow.storage.files import disk_errors, file_hash, fsync_folder, read_json, write_atomic, write_json
from rillflow.storage.segment_reader import SegmentReader
from rillflow.storage.segments import SegmentWriter

__all__ = [
    "SegmentReader",
    "SegmentWriter",
    "disk_errors",
    "file_hash",
    "fsync_folder",
    "read_json",
    "write_atomic",
    "write_json",
]
