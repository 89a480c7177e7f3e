"""A Ray cluster of several nodes on this host, in a process of its own: Ray's warnings and threads stay there.

with ray_cluster() as cluster:
    cluster.add("a", rollout=1, train=1)
    cluster.remove("a")                    # as a host that loses its power
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STORE = 80 << 20


class Nodes:
    """The cluster as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def add(self, name: str, **resources: float) -> None:
        self._ask({"add": name, "resources": resources})

    def remove(self, name: str) -> None:
        self._ask({"remove": name})

    def _ask(self, what: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError(f"the cluster has ended with code {self._process.wait(60)}")


@contextmanager
def ray_cluster() -> Iterator[Nodes]:
    """With a head that offers no tags: it is the driver's node."""
    settings = {
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | settings,
    )
    with process:
        try:
            yield Nodes(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _serve() -> None:
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    nodes: dict[str, Any] = {}
    print(f"> {cluster.address}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "add" in asked:
            nodes[asked["add"]] = cluster.add_node(
                wait=True, num_cpus=1, object_store_memory=_STORE, resources=asked["resources"]
            )
        else:
            cluster.remove_node(nodes.pop(asked["remove"]), allow_graceful=False)
        print("> done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
