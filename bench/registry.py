"""Every bench, the environments of its peers and the conditions it needs.

Each script under `bench/` that takes the shared arguments (`bench.common.parser`) has one entry in `BENCHES`; a test
checks it. To add a bench, write `bench/NAME.py` and add its line here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.far_links import why_not

ROOT = Path(__file__).resolve().parents[1]


class Missing(NamedTuple):
    """A condition that this machine does not meet, and the command that provides it."""

    reason: str
    command: str


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a peer, made by a command."""

    folder: str
    package: str  # the distribution of the peer
    command: tuple[str, ...]

    def ready(self) -> bool:
        """Return whether the environment holds its package."""
        python = ROOT / self.folder / "bin" / "python"
        if not python.is_file():
            return False
        look = f"import importlib.metadata; importlib.metadata.version({self.package!r})"
        return subprocess.run([python, "-c", look], capture_output=True, check=False, timeout=300).returncode == 0


@dataclass(frozen=True)
class Bench:
    """What `python -m bench.NAME` needs. `minutes` is its usual time with --quick on two cores, peers installed."""

    minutes: float
    environment: str = ""
    arguments: tuple[str, ...] = ()
    needs: tuple[Callable[[], Missing | None], ...] = ()

    @property
    def needs_gpu(self) -> bool:
        return gpu in self.needs

    def command(self, name: str) -> list[str]:
        """Return the command that runs it, less the arguments that all benches share."""
        return [sys.executable, "-m", f"bench.{name}", *self.arguments]

    def missing(self) -> Missing | None:
        """Return the first condition that this machine does not meet."""
        return next((found for need in self.needs if (found := need())), None)


def gpu() -> Missing | None:
    import torch

    return None if torch.cuda.is_available() else Missing("no CUDA device", "run it on a machine with a GPU")


def packages(*names: str) -> Missing | None:
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    return Missing(f"{' and '.join(absent)} not installed", f"pip install {' '.join(absent)}") if absent else None


def bubblewrap() -> Missing | None:
    if shutil.which("bwrap") is None:
        return Missing("bubblewrap is not installed", "apt-get install bubblewrap")
    trial = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(trial, capture_output=True, text=True, check=False, timeout=300)
    return Missing(done.stderr.strip(), "rillflow sandbox") if done.returncode else None


def network_namespaces() -> Missing | None:
    reason = why_not()
    if not reason:
        return None
    return Missing(reason, "apt-get install iproute2" if os.geteuid() == 0 else "sudo python -m bench cross_region")


def locked(name: str, package: str) -> Environment:
    """Return the environment of the lock file requirements/NAME.txt."""
    return Environment(f".venv-{name}", package, ("bash", "scripts/make_venv.sh", f".venv-{name}", name))


ENVIRONMENTS: dict[str, Environment] = {
    "litellm": locked("litellm", "litellm"),
    "oracle": locked("oracle", "trl"),
    "transferqueue": locked("transferqueue", "TransferQueue"),
    "vllm": Environment(".venv-vllm", "vllm", ("bash", "scripts/make_vllm_venv.sh", ".venv-vllm")),
}

BENCHES: dict[str, Bench] = {
    "startup": Bench(2),
    "logprobs": Bench(2),
    "engine": Bench(5, environment="vllm", arguments=("--vllm-python", ".venv-vllm/bin/python")),
    "structured": Bench(1),
    "gateway": Bench(3, environment="litellm"),
    "responsive": Bench(2),
    "sandbox": Bench(1, needs=(bubblewrap,)),
    "wire": Bench(0.5),
    "dataflow": Bench(4, environment="transferqueue"),
    "ledger": Bench(0.5),
    "ledgers": Bench(1.0),
    "two_policies": Bench(1.5),
    "multipolicy": Bench(3),
    "dashboard": Bench(3),
    "data_algorithms": Bench(4),
    "edf_simulation": Bench(0.5),
    "kernels": Bench(1),
    "trainer": Bench(1),
    "trainer_gpu": Bench(8, needs=(gpu,)),
    "moe_gpu": Bench(4, needs=(gpu,)),
    "memory": Bench(1),
    "tree": Bench(2),
    "weights": Bench(5),
    "weights_probe": Bench(0.5),
    "weights_update": Bench(2, environment="vllm", arguments=("--python", ".venv-vllm/bin/python")),
    "adapters_update": Bench(2, environment="vllm", arguments=("--python", ".venv-vllm/bin/python")),
    "catch_up": Bench(1),
    "cross_region": Bench(4, needs=(network_namespaces,)),
    "pipeline": Bench(4),
    "elastic": Bench(2),
    "autoscaling": Bench(0.5),
    "scale": Bench(3),
    "endtoend": Bench(5, environment="oracle"),
    "staleness": Bench(2),
    "recipes": Bench(2),
    "solver_verifier": Bench(5),
    "agentflow": Bench(5),
    "agents_gpu": Bench(10, needs=(gpu, partial(packages, "vllm"))),
    "async_gpu": Bench(10, needs=(gpu, partial(packages, "vllm", "trl"))),
    "weights_gpu": Bench(5, needs=(gpu, partial(packages, "triton"))),
}
