"""The executors: where a maintainer's nodes run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rillflow.config.runs import ScalingConfig
from rillflow.contracts import Executor
from rillflow.resources.executors.command import CommandExecutor
from rillflow.resources.executors.local import LocalExecutor


@dataclass(frozen=True)
class Home:
    """The settings with which nodes are started. `root` is the maintainer's folder (the run folder, if it has one),
    `url` the dataflow service's address, `token` the node's token, `environment` that of local processes, with the
    token."""

    root: Path
    url: str
    token: str
    token_file: Path
    environment: Mapping[str, str]


def build_executor(scaling: ScalingConfig, home: Home) -> Executor:
    if scaling.executor == "local":
        return LocalExecutor(home.root, home.url, home.environment)
    if scaling.executor == "ray":
        from rillflow.resources.executors.ray import RayExecutor

        return RayExecutor.of(home.root, home.url, home.token)
    assert scaling.start is not None
    assert scaling.stop is not None
    return CommandExecutor(
        home.root,
        start=scaling.start,
        stop=scaling.stop,
        alive=scaling.alive,
        url=home.url,
        token_file=home.token_file,
    )
