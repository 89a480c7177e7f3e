"""The log of a session as a protocol, and its events as bytes. With a log, a session survives the gateway's process.

Each event holds only what it adds to those before it. Ids take two bytes each if all ids of a node fit, else four.
Log-probs are float32, like the columns for training; raw ones are left out if they are equal. Versions are runs.
Integers beyond msgpack's 64 bits, which the arguments of a call may have, are written as bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

from rillflow.gateway.sessions.rewards import Gift
from rillflow.gateway.trees.messages import Body, Message, ToolCall, dump_object, message
from rillflow.gateway.trees.tree import Canonical, Fork, Node, Seam, TokenTree
from rillflow.types import Chunk, FinishReason

if TYPE_CHECKING:
    from rillflow.gateway.sessions.session import Session


class Asked(NamedTuple):
    """What the answers to one call share.

    `draw` is its number among the calls with the same prompt, `choices` the number of its answers. `live`: the agent
    may see tokens before an answer has ended.
    """

    call: str
    policy: str
    draw: int
    choices: int = 1
    live: bool = False


class SessionLog(Protocol):
    """Where sessions are kept. Events are on disk once `synced` returns; `ended` waits for that itself."""

    def restore(self) -> list[Session]:
        """Return the sessions that were not closed, with keys that lack their signatures. It is called once, first."""

    def opened(self, session: Session) -> None: ...

    def noted(self, session: Session) -> None:
        """Record that the session's detail has changed, or that it takes no more calls."""

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Record that sampling of `nodes`, one for each answer, begins."""

    async def shown(self, session: Session, asked: Asked) -> None:
        """Return once the beginning of a live call, whose tokens are about to be seen, is on disk."""

    async def ended(self, session: Session, asked: Asked, node: Node) -> None:
        """Return once the answer, and everything before it, is on disk. Raises if it cannot be written."""

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None:
        """Record that a call has failed. Its answers are never shown, except those that a later call extends."""

    def rewarded(self, session: Session) -> None: ...

    def closed(self, session: Session) -> None:
        """Forget a session: its record is safe elsewhere, or not needed."""

    async def synced(self) -> None: ...

    async def close(self) -> None: ...


class NoSessionLog:
    """A log that keeps nothing."""

    def restore(self) -> list[Session]:
        return []

    def opened(self, session: Session) -> None: ...

    def noted(self, session: Session) -> None: ...

    def begun(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None: ...

    async def shown(self, session: Session, asked: Asked) -> None: ...

    async def ended(self, session: Session, asked: Asked, node: Node) -> None: ...

    def abandoned(self, session: Session, asked: Asked, nodes: Sequence[Node]) -> None: ...

    def rewarded(self, session: Session) -> None: ...

    def closed(self, session: Session) -> None: ...

    async def synced(self) -> None: ...

    async def close(self) -> None: ...


class Kind(IntEnum):
    """The kinds of events. The frame log has its own kind for the end of a session (`storage.frame_log.END`)."""

    OPENED = 1
    NOTED = 2
    BEGUN = 3
    ANSWERED = 4
    ABANDONED = 5
    REWARDED = 6


class Opened(msgspec.Struct, array_like=True, frozen=True):
    """A session was opened. `name` is its key without the signature, so the log holds nothing that opens a session."""

    id: str
    name: str
    seed: int
    group: str
    until: float
    linger: float
    detail: dict[str, Any]


class Noted(msgspec.Struct, array_like=True, frozen=True):
    closed: bool
    detail: dict[str, Any]


class Begun(msgspec.Struct, array_like=True, frozen=True):
    """A live call has begun. `calls` is the number of calls that the session had made."""

    call: str
    calls: int
    nodes: list[int]


class Root(msgspec.Struct, array_like=True, frozen=True, tag=0):
    id: int
    tools: bytes


class Given(msgspec.Struct, array_like=True, frozen=True, tag=1):
    id: int
    parent: int
    tokens: bytes
    messages: list[Body]
    fork: Fork
    canonical: tuple[int, bytes] | None


class Sampled(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """A sampled node. `runs` has the number of tokens and their version. `raw` is empty if it equals `logprobs`."""

    id: int
    parent: int
    choice: str
    tokens: bytes
    logprobs: bytes
    raw: bytes
    runs: list[tuple[int, int]]
    seams: list[tuple[int, str]]
    temperature: float
    finish: FinishReason
    messages: list[Body]
    agent: str = ""
    constrained: bool = False
    experts: bytes = b""


Piece = Root | Given | Sampled


class Answered(msgspec.Struct, array_like=True, frozen=True):
    """An answer, with the nodes above it that are not in the log yet. `draw` is -1 for an aborted answer."""

    call: str
    policy: str
    draw: int
    choices: int
    calls: int
    node: int
    pieces: list[Piece]


class Abandoned(msgspec.Struct, array_like=True, frozen=True):
    call: str
    nodes: list[int]


Event = Opened | Noted | Begun | Answered | Abandoned | list[Gift]

_WIDE = 1  # the extension code of an integer of more than 64 bits


def _read_wide(code: int, data: memoryview) -> int:
    if code != _WIDE:
        raise ValueError(f"unknown msgpack extension {code}")
    return int.from_bytes(data, "little", signed=True)


_encode = msgspec.msgpack.Encoder().encode
_DECODERS: dict[int, msgspec.msgpack.Decoder[Any]] = {
    Kind.OPENED: msgspec.msgpack.Decoder(Opened, ext_hook=_read_wide),
    Kind.NOTED: msgspec.msgpack.Decoder(Noted, ext_hook=_read_wide),
    Kind.BEGUN: msgspec.msgpack.Decoder(Begun),
    Kind.ANSWERED: msgspec.msgpack.Decoder(Answered, ext_hook=_read_wide),
    Kind.ABANDONED: msgspec.msgpack.Decoder(Abandoned),
    Kind.REWARDED: msgspec.msgpack.Decoder(list[Gift]),
}


def encode(event: Event) -> bytes:
    try:
        return _encode(event)
    except OverflowError:
        return _encode(_with_extensions(msgspec.to_builtins(event, builtin_types=(bytes,))))


def _with_extensions(value: Any) -> Any:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_WIDE, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, dict):
        return {key: _with_extensions(item) for key, item in value.items()}
    return [_with_extensions(item) for item in value] if isinstance(value, list | tuple) else value


def decode(kind: int, payload: bytes) -> Event:
    """Decode an event. Raises msgspec.MsgspecError, or KeyError for an unknown kind."""
    event: Event = _DECODERS[kind].decode(payload)
    return event


# ---------------------------------------------------------------- nodes to bytes


def answered(asked: Asked, calls: int, node: Node, pieces: list[Piece]) -> bytes:
    call, policy, draw, choices, _ = asked
    return encode(Answered(call, policy, draw, choices, calls, node.id, pieces))


def piece_of(node: Node, tree: TokenTree) -> Piece:
    if node.kind == "root":
        return Root(node.id, next(tools for tools, root in tree.roots().items() if root is node))
    assert node.parent is not None
    tokens, bodies = _ids(node.tokens), [said.body for said in node.messages]
    if node.kind == "given":
        return Given(node.id, node.parent.id, tokens, bodies, node.fork, node.canonical)
    assert node.finish is not None
    logprobs, raw = _floats(node.logprobs), _floats(node.raw_logprobs)
    return Sampled(
        node.id,
        node.parent.id,
        node.call,
        tokens,
        logprobs,
        b"" if raw == logprobs else raw,
        _runs(node.versions),
        list(node.seams),
        node.temperature,
        node.finish,
        bodies,
        node.agent,
        node.constrained,
        node.experts,
    )


def _ids(tokens: Sequence[int]) -> bytes:
    """Encode ids. The first byte is the number of bytes for each id."""
    if not tokens:
        return b""
    small = max(tokens) < 1 << 16
    return (b"\2" if small else b"\4") + np.asarray(tokens, "<u2" if small else "<i4").tobytes()


def _floats(values: array[float]) -> bytes:
    """Encode an array of 32-bit floats."""
    return values.tobytes() if sys.byteorder == "little" else np.asarray(values, "<f4").tobytes()


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    if versions and versions.count(versions[0]) == len(versions):
        return [(len(versions), versions[0])]
    return [(len(list(run)), version) for version, run in groupby(versions)]


# ---------------------------------------------------------------- bytes to nodes


def make(piece: Piece, tree: TokenTree, nodes: dict[int, Node]) -> Node | None:
    """Add the node of a piece to the tree, with its next number. Returns None if its parent is not in `nodes`."""
    if isinstance(piece, Root):
        return tree.root(piece.tools)
    parent = nodes.get(piece.parent)
    if parent is None:
        return None
    if isinstance(piece, Given):
        canonical = None if piece.canonical is None else Canonical(*piece.canonical)
        said = [_message(body) for body in piece.messages]
        return tree.give(parent, _read_ids(piece.tokens), said, canonical=canonical, fork=piece.fork)
    node = tree.sample(parent, piece.temperature, piece.choice, piece.agent, constrained=piece.constrained)
    _fill(node, piece)
    node.end(piece.finish, _message(piece.messages[0]))
    return node


def _fill(node: Node, piece: Sampled) -> None:
    tokens = _read_ids(piece.tokens)
    logprobs = np.frombuffer(piece.logprobs, "<f4").tolist()
    raw = np.frombuffer(piece.raw, "<f4").tolist() if piece.raw else logprobs
    at = 0
    for count, version in piece.runs:
        here = slice(at, at + count)
        node.add(Chunk(tokens=tokens[here], logprobs=logprobs[here], raw_logprobs=raw[here], version=version))
        at += count
    node.seams = tuple(Seam(*seam) for seam in piece.seams)
    node.experts = piece.experts


def _read_ids(data: bytes) -> list[int]:
    if not data:
        return []
    ids: list[int] = np.frombuffer(data, "<u2" if data[0] == 2 else "<i4", offset=1).tolist()
    return ids


def _message(body: Body) -> Message:
    calls = [
        ToolCall(call["id"], call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in body.get("tool_calls", ())
    ]
    said = message(
        body["role"],
        body["content"],
        calls,
        reasoning=body.get("reasoning_content", ""),
        name=body.get("name", ""),
        call_id=body.get("tool_call_id", ""),
    )
    return said._replace(body=body)  # with the marks of its dialect


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else dump_object(value)
