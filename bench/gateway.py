"""The gateway against the LiteLLM proxy, in front of the same upstream, and what a session costs.

    bash scripts/make_venv.sh .venv-litellm litellm
    python -m bench.gateway [--quick] [--json FILE] [--peer FOLDER] [--only labr]

Side by side in one run, taking turns: the bare upstream, LiteLLM (one worker, defaults, a master key) and our gateway
(one process: keys, tokenizer, token trees, sessions on disk). The upstream gives the same 32 tokens after 50 ms, at
once or streamed in four parts; it speaks chat completions to LiteLLM and the engine protocol to us. The load comes from
a third process: agents on keep-alive connections play sessions of eight turns, so histories grow as agents' do.

(l) added latency: a call's time less the bare upstream's at the same number of concurrent calls, p50 and p99
(a) calls a second at saturation: the best over the numbers of concurrent calls
(b) bytes on disk of a 20-turn session, against one row a call (see `gateway_kept`)
(r) share of a session's time that goes into tokenising, at 8 and 128 turns
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.common import Report, parser
from bench.gateway_kept import kept, retokenising
from rillflow.gateway import Renderer

TOKENS, PARTS, TURNS = 32, 4, 8
AGENTS = (1, 64, 512)
START_DEADLINE = 300  # seconds; the proxy starts in 10 on two quiet cores
DEFAULT_PEER = Path(".venv-litellm")
CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
"""
PEER_KEY = f"sk-{secrets.token_hex(32)}"  # LiteLLM does not start without one
Measured = dict[str, Any]


class Asked:
    """A process of ours: a line of JSON asks, a line answers."""

    def __init__(self, module: str, *arguments: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pid = self._process.pid

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} has ended")
        return dict(json.loads(line))

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def answer() -> tuple[list[int], list[str]]:
    """The ids that the upstream gives, and the text of each part."""
    renderer = Renderer.load("tiny")
    text = " ".join(f"box {number} has {number + 3} bolts" for number in range(20))
    ids = renderer.encode(text)[: TOKENS - 1]
    size = TOKENS // PARTS
    texts = [renderer.decode(ids[at : at + size]) for at in range(0, TOKENS, size)]
    assert "".join(texts) == renderer.decode(ids)
    return [*ids, renderer.stop_tokens[0]], texts


def bodies(model: str, said: str, *, stream: bool) -> list[str]:
    """The requests of one session, turn by turn."""
    system = "You keep the stockroom. Answer with the number of items in the box that you are asked about."
    messages = [{"role": "system", "content": system}]
    made = []
    for turn in range(TURNS):
        messages.append(
            {"role": "user", "content": f"How many bolts are in box {turn}, and how many in box {turn + 7}?"}
        )
        made.append(json.dumps({"model": model, "messages": messages, "stream": stream, "max_tokens": TOKENS}))
        messages.append({"role": "assistant", "content": said})
    return made


@contextmanager
def litellm(folder: Path, upstream: int) -> Iterator[int | None]:
    """Its port; None where it is not installed."""
    program = folder / "bin" / "litellm"
    if not program.is_file():
        print(f"no peer: {program} is missing; run `bash scripts/make_venv.sh .venv-litellm litellm`", file=sys.stderr)
        yield None
        return
    with tempfile.TemporaryDirectory() as name, open(Path(name) / "log", "wb") as output:
        config = Path(name) / "config.yaml"
        config.write_text(CONFIG.format(port=upstream, model="policy"))
        port = _free_port()
        command = [program, "--config", config, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": PEER_KEY}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=name)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health/liveliness", process, Path(name) / "log")
            yield port
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"{url} did not answer within {START_DEADLINE} s; LiteLLM said:\n{log.read_text()[-2000:]}")


class Comparison:
    """Measures the three targets in turns."""

    def __init__(self, stack: ExitStack, peer: Path) -> None:
        ids, texts = answer()
        self._said = "".join(texts)
        self._upstream = self._start(stack, "bench.gateway_upstream", json.dumps({"ids": ids, "texts": texts}))
        self._upstream_port = self._upstream.hear()["port"]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._ours = self._start(stack, "bench.gateway_ours", f"http://127.0.0.1:{self._upstream_port}", folder)
        self._ours_port = self._ours.hear()["port"]
        self._load = self._start(stack, "bench.gateway_load")
        self.peer_port = stack.enter_context(litellm(peer, self._upstream_port))
        self.targets = ("bare", "ours", *(["litellm"] if self.peer_port else []))

    @staticmethod
    def _start(stack: ExitStack, module: str, *arguments: str) -> Asked:
        process = Asked(module, *arguments)
        stack.callback(process.close)
        return process

    def measure(self, target: str, agents: int, calls: int, *, stream: bool) -> Measured:
        model = ("parts" if stream else "whole") if target == "ours" else "policy"
        port = {"bare": self._upstream_port, "ours": self._ours_port, "litellm": self.peer_port}[target]
        keys = [PEER_KEY]
        if target == "ours":
            keys = self._ours.ask(open=calls // TURNS + agents + 1)["keys"]
        asked = bodies(model, self._said, stream=stream)
        found = self._load.ask(port=port, keys=keys, bodies=asked, agents=agents, calls=calls)
        if target == "ours":
            trained = self._ours.ask(close=True)["trained"]
            assert len(trained) == 1, f"a session is one path, not {trained}"
            assert trained[0] % TOKENS == 0
        points = statistics.quantiles(found["latencies"], n=100)
        return {"p50": points[49] * 1e3, "p99": points[98] * 1e3, "rate": found["rate"]}


def calls_of(target: str, agents: int, *, quick: bool) -> int:
    """Enough for each agent to wait its turn a few times, and for two seconds or more at the rates seen."""
    most = {1: 40, 64: 256, 512: 1024} if target == "litellm" else {1: 100, 64: 3000, 512: 6000}
    return most[agents] if quick else 2 * most[agents]


def compare(report: Report, comparison: Comparison, *, quick: bool, only: str) -> None:
    rounds: dict[tuple[bool, int, str], list[Measured]] = {}
    cases = [(stream, agents) for stream in (False, True) for agents in AGENTS]
    for stream, agents in cases:  # one to warm up
        for target in comparison.targets:
            comparison.measure(target, min(agents, 8), 64, stream=stream)
    for _ in range(1 if quick else 3):
        for stream, agents in cases:
            for target in comparison.targets:
                calls = calls_of(target, agents, quick=quick)
                found = comparison.measure(target, agents, calls, stream=stream)
                rounds.setdefault((stream, agents, target), []).append(found)
                print(f"{target:8s} {'stream' if stream else 'whole':6s} {agents:4d} {found}", file=sys.stderr)
    medians = {case: _medians(found) for case, found in rounds.items()}
    for stream in (False, True):
        kind = "streamed" if stream else "whole"
        if "l" in only:
            _latencies(report, medians, stream, kind)
        if "a" in only:
            rates = {
                target: max(medians[stream, agents, target]["rate"] for agents in AGENTS)
                for target in comparison.targets
            }
            _add(report, f"(a) {kind}: saturation", rates["ours"], rates.get("litellm"), unit="calls/s", goal=10.0)
            report.add(f"(a) {kind}: the bare upstream", rates["bare"], None, unit="calls/s")


def _medians(found: list[Measured]) -> Measured:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _latencies(report: Report, medians: dict[tuple[bool, int, str], Measured], stream: bool, kind: str) -> None:
    for agents in AGENTS:
        bare, mine = medians[stream, agents, "bare"], medians[stream, agents, "ours"]
        theirs = medians.get((stream, agents, "litellm"))
        for point, goal in (("p50", 8.0), ("p99", None)):
            added = max(mine[point] - bare[point], 0.001)
            other = None if theirs is None else theirs[point] - bare[point]
            name = f"(l) {kind}, {agents} at once: added {point}"
            _add(report, name, added, other, unit="ms", goal=goal, less_is_better=True)


def _add(report: Report, name: str, mine: float, theirs: float | None, **options: Any) -> None:
    report.add(name, mine, theirs, reason="" if theirs is not None else "no LiteLLM here", **options)


def report_kept(report: Report) -> None:
    mine, rows = asyncio.run(kept())
    unit = "bytes (peer: one row a call)"
    report.add("(b) a session of 20 turns", mine, rows, unit=unit, goal=8.0, less_is_better=True)


def report_retokenising(report: Report) -> None:
    for turns in (8, 128):
        mine, anew = asyncio.run(retokenising(turns))
        name = f"(r) {turns} turns: tokenising"
        report.add(name, mine, 2.0, unit="% of the time (peer: the bound)", goal=1.0, less_is_better=True)
        report.add(f"{name}, against all anew", mine, anew, unit="% of the time", less_is_better=True)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--peer", type=Path, default=DEFAULT_PEER, help="virtual environment that has LiteLLM")
    arguments.add_argument("--only", default="labr", help="which of the cases l, a, b and r")
    given = arguments.parse_args()
    report = Report("gateway")
    if set(given.only) & set("la"):
        with ExitStack() as stack:
            compare(report, Comparison(stack, given.peer.absolute()), quick=given.quick, only=given.only)
    if "b" in given.only:
        report_kept(report)
    if "r" in given.only:
        report_retokenising(report)
    report.finish(given.json)


if __name__ == "__main__":
    main()
