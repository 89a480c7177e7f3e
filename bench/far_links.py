"""Regions on one machine: network namespaces, links of a set rate between them, and a process that adds distance.

Each region has a link to the hub, shaped on both ends with a token bucket, and at its end a forwarder that holds every
byte back for half a round trip, in each direction, and a new connection for a whole one. A connection has at most
`WINDOW` bytes on their way, as TCP windows have it on a link that long; the slow start of TCP is not modelled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WINDOW = 4 << 20
FAR_PORT = 7000  # where a region reaches the hub's weight server, over the whole distance
_CHUNK = 64 << 10
_PIECES = WINDOW // _CHUNK


def why_not() -> str:
    """Empty where namespaces and token buckets can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "there is no ip or no tc (iproute2)"
    trial = f"rfx{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False).returncode:
        return "this machine does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", trial], check=False)
    return ""


@dataclass(frozen=True)
class Region:
    name: str
    mbit: float
    rtt: float  # seconds, added by the forwarder


class Links:
    """A hub and regions. Names carry the process id, so that several may be there at once."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = list(regions)
        self._tag = f"rf{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Links:
        try:
            _run("ip", "netns", "add", self._space("hub"))
            self._up("hub", "lo")
            for number, region in enumerate(self.regions, 1):
                self._link(number, region)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in ("hub", *(region.name for region in self.regions)):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", self._space(name))

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _up(self, space: str, device: str) -> None:
        _run("ip", "-n", self._space(space), "link", "set", device, "up")

    def _link(self, number: int, region: Region) -> None:
        _run("ip", "netns", "add", self._space(region.name))
        self._up(region.name, "lo")
        here, there = f"{self._tag}h{number}", f"{self._tag}r{number}"
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        for space, device, address in (("hub", here, 1), (region.name, there, 2)):
            _run("ip", "link", "set", device, "netns", self._space(space))
            _run("ip", "-n", self._space(space), "addr", "add", f"10.77.{number}.{address}/24", "dev", device)
            self._up(space, device)
            bucket = ("tbf", "rate", f"{region.mbit}mbit", "burst", "64kb", "latency", "200ms")
            _run("tc", "-n", self._space(space), "qdisc", "add", "dev", device, "root", *bucket)

    # ------------------------------------------------------------ what runs in them

    def start(self, space: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """A process in the hub or a region; it ends with the links."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space(space), *command], stdout=output, stderr=output
            )
        self._processes.append(process)
        return process

    def broken(self) -> bool:
        """Return whether a process has failed."""
        return any(process.poll() for process in self._processes)

    def start_distance(self, port: int, folder: Path) -> None:
        """In every region, the forwarder to the hub's `port`."""
        for number, region in enumerate(self.regions, 1):
            arguments = (str(FAR_PORT), f"10.77.{number}.1", str(port), str(region.rtt))
            self.start(region.name, [sys.executable, __file__, *arguments], folder / f"distance-{region.name}.log")

    def received(self, region: Region) -> int:
        """Bytes that have come into a region over its link."""
        device = f"{self._tag}r{self.regions.index(region) + 1}"
        counter = f"/sys/class/net/{device}/statistics/rx_bytes"
        return int(_run("ip", "netns", "exec", self._space(region.name), "cat", counter))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


# -------------------------------------------------------------------- the forwarder


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, begin: float) -> None:
    """Every byte comes out `delay` seconds after it went in, none before `begin`."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES)

    async def take() -> None:
        while data := await reader.read(_CHUNK):
            await under_way.put((max(loop.time(), begin) + delay, data))
        await under_way.put((loop.time() + delay, b""))

    taking = asyncio.create_task(take())
    try:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def forward(port: int, host: str, upstream: int, rtt: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = asyncio.get_running_loop().time() + rtt  # the handshake's round trip
        far: asyncio.StreamWriter | None = None
        try:
            back, far = await asyncio.open_connection(host, upstream)
            ways = (_carry(reader, far, rtt / 2, begin), _carry(back, writer, rtt / 2, begin))
            await asyncio.gather(*ways)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            if far is not None:
                far.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
