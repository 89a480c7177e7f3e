"""The lock files pin everything that pyproject.toml asks for, within the ranges that it allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import ENVIRONMENTS, TRACKERS, read, split_cuda

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")


def lines_of(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def pins(name: str, python: str, machine: str) -> dict[str, str]:
    """Return the version of every package that a lock file installs there."""
    where = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    where |= {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    found: dict[str, str] = {}
    for line in lines_of(name):
        if line.marker is None or line.marker.evaluate(where):
            key = canonicalize_name(line.name)
            assert key not in found, f"{line} is pinned twice for Python {python} on {machine}"
            found[key] = str(line.specifier).removeprefix("==")
    return found


def asked(name: str) -> list[Requirement]:
    """Return what the package asks for in the environment of that name. The extras of trackers have their own."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    lists = {
        "rillflow": [project["dependencies"]],
        "trackers": [extras[extra] for extra in TRACKERS],
        "dev": [
            project["dependencies"],
            *(lines for extra, lines in extras.items() if extra not in TRACKERS),
            PROJECT["dependency-groups"]["dev"],
        ],
    }
    return [Requirement(line) for lines in lists[name] for line in lines]


def test_there_is_a_lock_for_every_environment() -> None:
    assert {path.stem for path in (ROOT / "requirements").glob("*.txt")} == {*ENVIRONMENTS, "cuda"}


@pytest.mark.parametrize("name", [*ENVIRONMENTS, "cuda"])
def test_every_line_is_pinned(name: str) -> None:
    assert lines_of(name)
    assert all(re.fullmatch(r"==[^,*]+", str(line.specifier)) for line in lines_of(name))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["rillflow", "dev", "trackers"])
def test_what_the_package_asks_for_is_pinned_within_its_ranges(name: str, python: str, machine: str) -> None:
    found = pins(name, python, machine)
    for requirement in asked(name):
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/{name}.txt: run `make lock`"
        assert requirement.specifier.contains(version), (
            f"{requirement} does not allow the locked {version}: `make lock`"
        )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_users_and_developers_have_the_same_versions(python: str, machine: str) -> None:
    assert pins("rillflow", python, machine).items() <= pins("dev", python, machine).items()


def test_packages_of_cuda_builds_are_apart() -> None:
    text = (
        "torch==2\n    # via\n    #   -r a.in\n    #   x\ntriton==3\n    # via torch\nnvidia-a==1\n    # via nvidia-b\n"
    )
    text += "nvidia-b==1 ; sys_platform == 'linux'\n    # via torch\n"
    assert read(text)["torch==2"] == {"-r", "x"}
    assert split_cuda(read(text)) == (
        ["torch==2"],
        ["triton==3", "nvidia-b==1 ; sys_platform == 'linux'", "nvidia-a==1"],
    )
    needed = text.replace("triton==3\n    # via torch", "triton==3\n    # via\n    #   torch\n    #   xgrammar")
    assert split_cuda(read(needed))[0] == ["torch==2", "triton==3"]
