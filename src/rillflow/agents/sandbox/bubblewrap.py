"""The command line that starts a zygote inside bubblewrap, and the hint if that is not possible.

Inside, there is no network and none of our processes, files or environment variables; the system is read-only and the
user has no rights. If we are root, the kernel also sees another user, because its limit on processes does not apply to
root.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from rillflow.errors import SandboxError

INSIDE = Path(__file__).parent / "inside"
HOME = "/opt/sandbox"  # where `inside` is mounted
PACKAGES = "/opt/packages"
_NOBODY = "65534"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OF_ETC = ("/etc/ld.so.cache", "/etc/alternatives")
_STAGE = "/mnt"
_USERS = 1_900_000_000  # above the ids of people and services
INSTALL = (
    "install bubblewrap (Debian and Ubuntu: `apt install bubblewrap`) and allow user namespaces (in Docker: "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined`; Ubuntu 24.04 and later: `sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0`); or choose `isolation: process`, which does not hold hostile code"
)
Mounts = list[tuple[str, str]]


def base_python() -> tuple[Path, Path]:
    """Return the folder and the program of the Python installation behind this interpreter, without symbolic links.

    A virtual environment may hold a copy of the program instead of a link to it; the copy does not run without the
    environment, so the installation's own program is used then.
    """
    folder = Path(sys.base_prefix).resolve()
    program = Path(sys.executable).resolve()
    if not program.is_relative_to(folder):
        program = (folder / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}").resolve()
    return folder, program


def python_command(home: str, control: int) -> list[str]:
    """Return the command that runs this Python without its site packages and our environment."""
    python = str(base_python()[1])
    start = f"import sys; sys.path.insert(0, {home!r}); from inside.zygote import main; main()"
    return [python, "-P", "-S", "-s", "-B", "-c", start, str(control)]


def command(packages: tuple[str, ...], control: int, seccomp: int) -> list[str]:
    """Return the command line; if we are root, it first drops its rights."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap (`bwrap`) is not installed: code cannot be run safely here", INSTALL)
    mounts: Mounts = [(str(INSIDE), f"{HOME}/inside"), *_package_mounts(packages)]
    folder, _ = base_python()
    if not folder.is_relative_to("/usr"):
        mounts.append((str(folder), str(folder)))
    before: list[str] = []
    if os.geteuid() == 0:
        before, mounts = _as_another(mounts)
    return [*before, bwrap, *_walls(seccomp), *_files(mounts), "--", *python_command(HOME, control)]


def _walls(seccomp: int) -> list[str]:
    return [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *(part for name, value in environment().items() for part in ("--setenv", name, value)),
        *("--seccomp", str(seccomp)),
    ]


def environment() -> dict[str, str]:
    """Return the environment of programs. The hash seed is fixed, so the same code gets the same verdict."""
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    return {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", **threads}


def _files(mounts: Mounts) -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    for name in _OF_ETC:
        arguments += ["--ro-bind-try", name, name]
    for source, place in mounts:
        arguments += ["--ro-bind", source, place]
    for name in ("/dev", "/"):  # both are unbounded file systems in memory, so they are read-only
        arguments += ["--dev", "/dev", "--proc", "/proc", "--dir", "/tmp"] if name == "/dev" else []
        arguments += ["--remount-ro", name]
    return [*arguments, "--chdir", "/"]


def _package_mounts(packages: tuple[str, ...]) -> Mounts:
    """Return the folders of the packages, and those in which wheels keep their libraries."""
    mounts: Mounts = []
    for name in packages:
        found = importlib.util.find_spec(name)
        if found is None or not found.submodule_search_locations:
            raise SandboxError(f"no package {name} to show in the sandbox", f"`pip install {name}`, or leave it out")
        folder = Path(next(iter(found.submodule_search_locations)))
        beside = [folder.parent / f"{folder.name}.libs"]
        mounts += [(str(one), f"{PACKAGES}/{one.name}") for one in (folder, *beside) if one.is_dir()]
    return mounts


def _as_another(mounts: Mounts) -> tuple[list[str], Mounts]:
    """Return the command that root puts before bubblewrap, and the mounts behind it.

    It mounts the folders, which may be readable only by root, under a path that all users can read, and then becomes a
    user that owns nothing. Each step execs the next, so the process that we started is bubblewrap itself.
    """
    found = {name: shutil.which(name) for name in ("unshare", "setpriv", "mount")}
    if None in found.values():
        raise SandboxError(
            "`unshare`, `setpriv` or `mount` is not installed, and code is not run as root",
            "install util-linux (and mount), or run as a user other than root",
        )
    staged = [f"{_STAGE}/{index}" for index in range(len(mounts))]
    steps = [f"{found['mount']} -t tmpfs -o mode=755 none {_STAGE}"]
    for (source, _), place in zip(mounts, staged, strict=True):
        steps += [f"mkdir {place}", f"{found['mount']} --bind {shlex.quote(source)} {place}"]
    show = [str(found["unshare"]), "--mount", "--propagation", "private", "--", "/bin/sh", "-ec"]
    show += ["; ".join([*steps, 'exec "$@"']), "sh"]
    user = str(_USERS + os.getpid())
    change = [str(found["setpriv"]), "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all"]
    return [*show, *change, "--no-new-privs"], [(new, place) for new, (_, place) in zip(staged, mounts, strict=True)]
