"""An engine host in another process.

An engine that cannot be reached, that hangs up or that is silent for `stall` seconds is EngineLost: what came before
stands, the rest can be sampled elsewhere. What is wrong with the request itself comes back as the error that it is;
whatever else is said there, perhaps by another program that has the engine's port now, is a loss too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import aiohttp
import msgspec
from yarl import URL

from rillflow.engine.frames import LENGTH, LONGEST, Frame, Generate, Hold, Release, decode
from rillflow.engine.host import HOLD_SECONDS
from rillflow.errors import BadRequest, EngineError, EngineLost, ErrorBody, RillflowError, from_body
from rillflow.types import Chunk, EngineInfo, GenerateRequest
from rillflow.types.decoding import msgpack_decoder

STALL_SECONDS = 10.0
CONNECT_SECONDS = 3.0
CONTROL_SECONDS = 2.0
NEWS_SECONDS = 2.0  # what others say of an engine may be so old: a beat, and a look at the roster
_CONNECTIONS = 8192  # bounded by the gateway's calls, which are bounded before they come here
_END_SECONDS = 1.0
_OF_REQUESTS = (BadRequest, EngineError)


class RemoteEngine:
    """One engine process, by name and address. `known` is the newest that was heard of it, from whomever."""

    def __init__(
        self, name: str, url: str, token: str, *, stall: float = STALL_SECONDS, connect: float = CONNECT_SECONDS
    ) -> None:
        self.name = name
        self.known = EngineInfo(name=name, url=url, versions={}, context=0, slots=1)
        self._url = url
        self._generate = URL(f"{url}/generate")
        self._stall = stall
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        self._headers = {"authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False
        self._told_at = -math.inf  # when the engine itself last said how it is
        self._noted_at: dict[str, float] = {}  # when a policy's tokens last said that it has newer weights
        self._encode = msgspec.msgpack.Encoder().encode

    def hear(self, info: EngineInfo) -> None:
        """What others say of it. It may be older than the engine's own word and tokens: of two versions the newer one
        counts then. Theirs may be newer as well, where nobody has sampled since: who waits for it would wait on."""
        known, since = self.known, asyncio.get_running_loop().time() - NEWS_SECONDS
        newer = {
            policy: max(version, info.versions.get(policy, version))
            for policy, version in known.versions.items()
            if max(self._told_at, self._noted_at.get(policy, -math.inf)) > since
        }
        paused = known.paused if self._told_at > since else info.paused
        self.known = msgspec.structs.replace(info, versions=info.versions | newer, paused=paused)

    async def info(self) -> EngineInfo:
        """Ask it; EngineLost when it does not answer."""
        return await self._told("GET", "/status")

    async def hold(self, reason: str, *, move: bool = False, seconds: float = HOLD_SECONDS) -> EngineInfo:
        return await self._told("POST", "/pause", Hold(reason=reason, move=move, seconds=seconds))

    async def release(self, reason: str) -> EngineInfo:
        return await self._told("POST", "/resume", Release(reason=reason))

    async def _told(self, method: str, path: str, ask: Hold | Release | None = None) -> EngineInfo:
        """Once: who asks looks again by itself."""
        data = None if ask is None else self._encode(ask)
        limit = aiohttp.ClientTimeout(total=CONTROL_SECONDS)
        with self._losses(CONTROL_SECONDS):
            async with self._open().request(method, self._url + path, data=data, timeout=limit) as response:
                body = await response.read()
                if response.status != 200:
                    raise _refusal(self.name, response.status, body)
            self.known = msgpack_decoder(EngineInfo).decode(body)
            self._told_at = asyncio.get_running_loop().time()
        return self.known

    async def close(self) -> None:
        """Answers under way, and whatever is asked later, are EngineLost."""
        self._closed = True
        # A session that is closed leaves who reads from it waiting for ever: they are ended here.
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------ sampling

    async def generate(self, policy: str, request: GenerateRequest, floor: int = -1) -> AsyncGenerator[Chunk]:
        body = self._encode(Generate(policy=policy, request=request, floor=floor))
        with self._losses(self._stall):
            async with self._watched():
                response = await self._open().post(self._generate, data=body)
            async with response:
                if response.status != 200:
                    async with self._watched():
                        raise _refusal(self.name, response.status, await response.read())
                while True:
                    async with self._watched():
                        chunk = await self._chunk(response.content)
                    if chunk is None:
                        continue
                    self._note(policy, chunk.version)
                    if chunk.finish is not None:
                        await _to_the_end(response)
                        yield chunk
                        return
                    yield chunk

    async def _chunk(self, stream: aiohttp.StreamReader) -> Chunk | None:
        """The next frame's chunk, None for a sign of life; raises the error that a frame carries."""
        size = int.from_bytes(await stream.readexactly(LENGTH), "little")
        if size > LONGEST:
            raise EngineLost(f"engine {self.name} sent a frame of {size} bytes")
        if not size:
            return None
        frame: Frame = decode(await stream.readexactly(size))
        if frame.error is not None:
            raise _said(self.name, from_body(frame.error))
        return frame.chunk

    def _note(self, policy: str, version: int) -> None:
        # Streams are read at different speeds: what is older than known is old news.
        if self.known.versions.get(policy, -1) < version:
            self.known = msgspec.structs.replace(self.known, versions=self.known.versions | {policy: version})
            self._noted_at[policy] = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        """A wait for the engine: it ends with the stall deadline, and when this is closed."""
        if self._closed:  # a closed session's answers are not even lost in good order
            raise self._gone()
        async with asyncio.timeout(self._stall) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    @contextmanager
    def _losses(self, silence: float) -> Iterator[None]:
        """Whatever says that the engine is not there is EngineLost."""
        try:
            yield
        except asyncio.IncompleteReadError as error:
            raise EngineLost(f"engine {self.name} hung up in the middle of an answer") from error
        except TimeoutError as error:
            raise EngineLost(f"engine {self.name} was silent for {silence:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"engine {self.name} cannot be reached: {type(error).__name__}: {error}") from error
        except msgspec.MsgspecError as error:
            raise EngineLost(f"engine {self.name} answered with something else: {error}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise self._gone()
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=30.0)
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=self._timeout,
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
                auto_decompress=False,
            )
        return self._session

    def _gone(self) -> EngineLost:
        return EngineLost(f"engine {self.name} has gone from {self._url}")


async def _to_the_end(response: aiohttp.ClientResponse) -> None:
    """Read the end of an answer that is all there, so that its connection can serve again."""
    with suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await response.read()


def _refusal(name: str, status: int, body: bytes) -> RillflowError:
    try:
        return _said(name, from_body(msgpack_decoder(ErrorBody).decode(body)))
    except msgspec.MsgspecError:
        return EngineLost(f"engine {name} answered with status {status}")


def _said(name: str, error: RillflowError) -> RillflowError:
    if isinstance(error, _OF_REQUESTS) and not isinstance(error, EngineLost):
        return error
    return EngineLost(f"engine {name}: {error.message}", error.hint)
