"""Weights across regions: a trainer that never waits, pools far away that pause only to apply, relays that save links.

A trainer (AdamW, fp32 masters, bf16 copies, lr 3e-6) publishes a version every few seconds into its store. Three pools
follow it and sample all the time: one beside it, two in regions of their own, each at 300 ms round trip behind a
narrow link (network namespaces with token buckets, and a process that holds every byte back). Measured, with whole
versions and with deltas: what the trainer waited; for how long a pool's engine sampled nothing at each update, beside
the time it took to apply it; how long each link was busy. Then a region with two new nodes pulls a whole version, each
directly and through a relay. Needs root; nothing of this machine's network is touched.

The peer of each row is the same thing with whole versions, or without a relay.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.common import Report, parser
from bench.cross_region_parts import THINK, TOKEN, Pool, Pull, Train, make_model
from bench.far_links import FAR_PORT, Links, Region, why_not

RTT = 0.3
RATE = 3e-6
SERVER_PORT, RELAY_PORT = 7100, 7200
# On paper: 14B weights in bf16, a link of 4 Gbit/s.
PAPER_WEIGHTS, PAPER_BITS = 14.8e9, 4e9
console = Console(stderr=True, width=150)


class Size(NamedTuple):
    width: int
    layers: int
    steps: int
    period: float
    regions: tuple[Region, ...]
    think: float = THINK


# Links as narrow for these models as a few Gbit/s are for 14B. CPUs are slow at bf16, so models are small.
REGIONS = (Region("east", 5, RTT), Region("west", 2.5, RTT))
WHOLE = Size(256, 4, 12, 6.0, REGIONS)
QUICK = Size(192, 3, 5, 4.0, REGIONS)


class World:
    """One phase: a root folder, links, and processes in them that write what they found."""

    def __init__(self, root: Path, links: Links) -> None:
        self.root = root
        self.links = links
        self.region = {region.name: region for region in links.regions}

    def start(self, space: str, kind: str, name: str, ask: NamedTuple) -> Callable[[float], dict[str, Any]]:
        """Returns a wait for its result."""
        out = self.root / f"{name}.json"
        arguments = json.dumps(ask._asdict())
        command = [sys.executable, "-m", "bench.cross_region_parts", kind, arguments, str(out)]
        process = self.links.start(space, command, self.root / f"{name}.log")

        def result(seconds: float) -> dict[str, Any]:
            if process.wait(seconds):
                raise RuntimeError(f"{name} failed:\n{(self.root / f'{name}.log').read_text()[-3000:]}")
            found: dict[str, Any] = json.loads(out.read_text())
            return found

        return result

    def wait_for(self, name: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not (self.root / name).exists():
            if time.monotonic() > end or self.links.broken():
                logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.root.glob("*.log"))
                raise TimeoutError(f"{name} did not come within {seconds:.0f} s:\n{logs}")
            time.sleep(0.05)

    def serve(self) -> None:
        """The weight server in the hub, and the distance to it in every region."""
        code = (
            "import asyncio, sys; from pathlib import Path; "
            "from rillflow.weights.transport.serve import serve_weights; "
            f"asyncio.run(serve_weights(Path(sys.argv[1]), {TOKEN!r}, host='0.0.0.0', port={SERVER_PORT}, "
            "on_ready=lambda url: Path(sys.argv[2]).touch()))"
        )
        weights = str(self.root / "weights")
        self.links.start("hub", [sys.executable, "-c", code, weights, str(self.root / "served")], self.root / "s.log")
        self.wait_for("served")
        self.links.start_distance(SERVER_PORT, self.root)

    def relay(self, region: Region) -> None:
        code = (
            "import asyncio, sys; from pathlib import Path; from rillflow.weights.transport.relay import serve_relay; "
            "from rillflow.wire.tokens import scoped_token; "
            f"asyncio.run(serve_relay(['http://127.0.0.1:{FAR_PORT}'], Path(sys.argv[1]), "
            f"scoped_token({TOKEN!r}, 'reader'), "
            f"port={RELAY_PORT}, on_ready=lambda url: Path(sys.argv[2]).touch()))"
        )
        arguments = (str(self.root / "relay"), str(self.root / "relayed"))
        self.links.start(region.name, [sys.executable, "-c", code, *arguments], self.root / "relay.log")
        self.wait_for("relayed")


def follow(size: Size, root: Path, *, deltas: bool, pools: bool) -> dict[str, Any]:
    """A training run with its pools, or alone."""
    far = f"http://127.0.0.1:{FAR_PORT}"
    with Links(size.regions) as links:
        world = World(root, links)
        (root / "weights").mkdir()
        world.serve()
        spaces = {"local": ("hub", ""), **{region.name: (region.name, far) for region in size.regions}} if pools else {}
        trainer = world.start("hub", "train", "trainer", Train(str(root), size.steps, size.period, deltas, RATE))
        world.wait_for("ready")
        running = {
            name: world.start(space, "pool", name, Pool(str(root), name, source, "auto", size.think))
            for name, (space, source) in spaces.items()
        }
        for name in running:
            world.wait_for(f"ready-{name}", 240)
        (root / "go").touch()
        found = {"trainer": trainer(size.steps * size.period * 3 + 120)}
        (root / "stop").touch()
        return found | {name: result(240) for name, result in running.items()}


def region_pull(size: Size, root: Path, *, relay: bool) -> dict[str, Any]:
    """Two new nodes of one region take the same whole version at once."""
    region = size.regions[0]
    with Links([region]) as links:
        world = World(root, links)
        world.serve()
        if relay:
            world.relay(region)
        source = f"http://127.0.0.1:{RELAY_PORT if relay else FAR_PORT}"
        nodes = [world.start(region.name, "pull", f"n{n}", Pull(str(root), f"n{n}", source, "full")) for n in range(2)]
        for n in range(2):
            world.wait_for(f"ready-n{n}")
        before = links.received(region)
        (root / "go").touch()
        found = [result(300) for result in nodes]
        return {"seconds": max(one["seconds"] for one in found), "bytes": links.received(region) - before}


def measured(size: Size, work: Path) -> dict[str, Any]:
    """All phases, each in a folder of its own."""
    model = work / "model"
    found: dict[str, Any] = {"model_bytes": make_model(model, size.width, size.layers)}

    def phase(name: str) -> Path:
        root = work / name
        root.mkdir()
        (root / "model").symlink_to(model)
        return root

    found["alone"] = follow(size, phase("alone"), deltas=True, pools=False)
    for kind in ("full", "delta"):
        console.print(f"pools with {kind} versions …")
        found[kind] = follow(size, phase(kind), deltas=kind == "delta", pools=True)
    console.print("two new nodes of a region …")
    for kind in ("direct", "relay"):
        root = phase(kind)
        (root / "weights").symlink_to(work / "alone" / "weights")
        found[kind] = region_pull(size, root, relay=kind == "relay")
    return found


# -------------------------------------------------------------------- what came out


class Row(NamedTuple):
    """The updates of one pool, without its first pull. Means of seconds."""

    updates: int
    kind: str
    megabytes: float
    fetch: float
    verify: float
    apply: float
    pause: float
    still: float  # what its answers stood still, beyond the usual time of a token
    usual: float
    lag: float


def row(pool: dict[str, Any]) -> Row:
    done = pool["transfers"][1:] or pool["transfers"]
    seams = [pool["seams"][str(one["version"])] for one in done if str(one["version"]) in pool["seams"]]

    def mean(field: str) -> float:
        return statistics.mean(one[field] for one in done)

    kinds = "+".join(sorted({one["kind"] for one in done}))
    still = statistics.median(seams) if seams else float("nan")
    times = (mean("fetch"), mean("verify"), mean("apply"), mean("pause"))
    return Row(len(done), kinds, mean("bytes") / 1e6, *times, still, pool["usual_gap"], pool["lag"])


def show(size: Size, found: dict[str, Any]) -> None:
    table = Table(title=f"pools of a model of {found['model_bytes'] / 1e6:.1f} MB, a version every {size.period:.0f} s")
    headings = (
        "pool, link, versions, pulls, MB, fetch s, verify ms, apply ms, pause ms, stands still ms, a token ms, lag"
    )
    for heading in headings.split(", "):
        table.add_column(heading, justify="right")
    links = {region.name: f"{region.mbit:g} Mbit/s" for region in size.regions}
    for kind in ("full", "delta"):
        for name in ("local", *links):
            one = row(found[kind][name])
            numbers = (f"{1000 * x:.1f}" for x in (one.verify, one.apply, one.pause, one.still, one.usual))
            cells = (name, links.get(name, "-"), one.kind, str(one.updates), f"{one.megabytes:.2f}", f"{one.fetch:.2f}")
            table.add_row(*cells, *numbers, f"{one.lag:.2f}")
    console.print(table)
    paper = on_paper(found)
    console.print(f"on paper, 14B at 4 Gbit/s and 300 ms: whole {paper['full']:.1f} s, delta {paper['delta']:.1f} s")


def on_paper(found: dict[str, Any]) -> dict[str, float]:
    """Seconds for 14B weights over 4 Gbit/s: bytes by the rate, and two round trips (manifest, file)."""
    share = found["delta"]["trainer"]["delta_bytes"] / found["delta"]["trainer"]["full_bytes"]
    whole = 8 * 2 * PAPER_WEIGHTS / PAPER_BITS
    return {"full": whole + 2 * RTT, "delta": share * whole + 2 * RTT}


def report(size: Size, found: dict[str, Any], destination: str | None) -> None:
    result = Report("cross_region")

    def waits(phase: str) -> float:
        return 1000 * statistics.mean(step["wait"] for step in found[phase]["trainer"]["steps"])

    for phase in ("full", "delta"):
        result.add(
            f"trainer waits for weights a step, {phase}",
            waits(phase),
            None,
            unit="ms",
            reason="no pools: " + f"{waits('alone'):.1f} ms",
        )
    for region in size.regions:
        full, delta = row(found["full"][region.name]), row(found["delta"][region.name])
        where = f"{region.name}, {region.mbit:g} Mbit/s"
        result.add(f"transfer, {where}", delta.fetch, full.fetch, unit="s", less_is_better=True)
        result.add(f"bytes, {where}", delta.megabytes, full.megabytes, unit="MB", less_is_better=True)
        result.add(f"versions behind, {where}", delta.lag, full.lag, unit="versions", less_is_better=True)
    for name in ("local", *(region.name for region in size.regions)):
        one = row(found["delta"][name])
        result.add(
            f"no token is sampled at an update, {name}; peer: applying alone",
            1000 * one.pause,
            1000 * one.apply,
            unit="ms",
            less_is_better=True,
        )
    direct, relay = found["direct"], found["relay"]
    result.add(
        "two nodes of a region, link",
        relay["bytes"] / 1e6,
        direct["bytes"] / 1e6,
        unit="MB",
        goal=1.8,
        less_is_better=True,
    )
    result.add(
        "two nodes of a region, both have it",
        relay["seconds"],
        direct["seconds"],
        unit="s",
        goal=1.5,
        less_is_better=True,
    )
    paper = on_paper(found)
    result.add("14B at 4 Gbit/s, on paper", paper["delta"], paper["full"], unit="s", less_is_better=True)
    result.finish(destination)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--keep", metavar="FILE", help="write everything that was measured to FILE, as JSON")
    options = made.parse_args()
    reason = why_not()
    if reason:
        raise SystemExit(f"bench.cross_region cannot run here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no namespace is left
    size = QUICK if options.quick else WHOLE
    with tempfile.TemporaryDirectory(prefix="cross-region-") as folder:
        found = measured(size, Path(folder))
    if options.keep:
        Path(options.keep).write_text(json.dumps(found))
    show(size, found)
    report(size, found, options.json)


if __name__ == "__main__":
    main()
