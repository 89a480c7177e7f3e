"""Signatures of manifests and lines: HMAC-SHA256 of their canonical JSON, with a key made of the node's token.

Who holds the key knows that a version was published by this run's trainer, whatever carried the files: the manifest is
signed, and it has the hashes of all files. Without a key nothing is checked but the hashes.

What it does not protect against: somebody who has that token; a carrier that shows an older line than the newest one,
or the versions of another policy of the same run.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import msgspec

from rillflow.errors import CorruptData
from rillflow.types.decoding import json_decoder
from rillflow.weights.manifest import Line, VersionManifest
from rillflow.weights.sealed import FILE_NAME

S = TypeVar("S", Line, VersionManifest)

_PURPOSE = b"rillflow weights"


def key_of(node_token: str) -> bytes:
    """The key that a run's node token stands for; none for no token."""
    return hmac.digest(node_token.encode(), _PURPOSE, "sha256") if node_token else b""


def signed(value: S, key: bytes) -> S:
    """With the signature of all its other fields; with none where there is no key."""
    return msgspec.structs.replace(value, signature=_signature(value, key) if key else "")


def check(value: S, key: bytes, what: str) -> None:
    """CorruptData when there is a key and `value` is not signed with it; `what` names it in the message."""
    if key and not hmac.compare_digest(_signature(value, key).encode(), value.signature.encode()):
        raise CorruptData(
            f"{what} is not signed with this run's key" if value.signature else f"{what} is not signed",
            "it was changed on the way, or it is of another run: check where weights are pulled from",
        )


def parse_line(data: bytes, key: bytes, what: str) -> Line:
    """The line in these bytes, validated and checked."""
    try:
        line = json_decoder(Line).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{what} does not name a head: {error}", "it is damaged") from error
    check(line, key, what)
    return line


def parse_manifest(data: bytes, version: int, key: bytes, what: str) -> VersionManifest:
    """The manifest in these bytes, validated and checked: of this version, and of files that have plain names."""
    try:
        manifest = json_decoder(VersionManifest).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptData(f"{what} is not a valid manifest: {error}", "it is damaged") from error
    check(manifest, key, what)
    if manifest.version != version:
        raise CorruptData(f"{what} is of version {manifest.version}", "it was moved or changed")
    if not all(FILE_NAME.fullmatch(name) for name in manifest.files):
        raise CorruptData(f"{what} names files that cannot be", "it was changed")
    return manifest


def _signature(value: Line | VersionManifest, key: bytes) -> str:
    canonical = msgspec.to_builtins(msgspec.structs.replace(value, signature=""), str_keys=True, order="sorted")
    return hmac.new(key, msgspec.json.encode(canonical), hashlib.sha256).hexdigest()
