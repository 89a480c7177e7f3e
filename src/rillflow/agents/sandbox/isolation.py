"""The isolation of a sandbox from outside: the command line of bubblewrap, and the filter of system calls.

Inside bubblewrap the code has no network and sees none of our processes, files or environment variables; the system is
read-only and the user has no rights. If we are root, the kernel also sees another user, because its limit on processes
does not apply to root.

The filter is a seccomp program in the kernel's packet-filter language. It refuses what a computing program never needs:
new namespaces and mounts, the memory of other processes, the network (also sockets that a network namespace does not
contain, such as vsock), kernel interfaces with a history of faults, and memory that no limit counts. Calls of another
architecture kill the process; calls newer than this list fail with ENOSYS.

Not protected against: a fault in a permitted system call. The kernel is shared.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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


_INSTRUCTION = struct.Struct("<HBBI")
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _GIVE = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NAMESPACES = 0x7E020000  # the flags of clone that make new namespaces
_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: input into another's terminal
# The calls that the isolating process needs before it gives up its rights.
_BUILDERS = ("unshare", "mount", "sethostname")
# The refused calls: name, number on x86_64, number on aarch64. From 424 on the numbers are the same everywhere.
_REFUSED = {
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "mknodat": (259, 33),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vhangup": (153, 58),
}
_ONLY_X86_64 = {
    "uselib": 134,
    "mknod": 133,
    "ustat": 136,
    "sysfs": 139,
    "_sysctl": 156,
    "modify_ldt": 154,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "get_kernel_syms": 177,
    "query_module": 178,
}
_NEWEST = 450  # newer calls fail with ENOSYS


@dataclass(frozen=True)
class Machine:
    """The numbers that a filter for one machine needs."""

    architecture: int
    newest: int
    clone: int
    clone3: int
    socket: int
    ioctl: int
    calls: dict[str, int]


MACHINES = {
    "x86_64": Machine(
        architecture=0xC000003E,
        newest=_NEWEST,
        clone=56,
        clone3=435,
        socket=41,
        ioctl=16,
        calls={name: numbers[0] for name, numbers in _REFUSED.items()} | _ONLY_X86_64,
    ),
    "aarch64": Machine(
        architecture=0xC00000B7,
        newest=_NEWEST,
        clone=220,
        clone3=435,
        socket=198,
        ioctl=29,
        calls={name: numbers[1] for name, numbers in _REFUSED.items()},
    ),
}


def program(*, building: bool = False, machine: str | None = None) -> bytes:
    """Return the filter for this machine; `building` permits the calls that isolate a sandbox."""
    name = machine or platform.machine()
    if name not in MACHINES:
        raise SandboxError(
            f"no filter of system calls is known for the machine {name}",
            f"known: {', '.join(MACHINES)}; run the sandbox there",
        )
    return b"".join(_assemble(MACHINES[name], building))


def _assemble(machine: Machine, building: bool) -> list[bytes]:
    calls = machine.calls
    refused = [number for call, number in calls.items() if not (building and call in _BUILDERS)]
    lines = [
        _load(_ARCHITECTURE),
        *_if_not(_EQUAL, machine.architecture, [_give(_KILL)]),
        _load(_NUMBER),
        *_if(_GREATER, machine.newest, [_give(_ERROR | errno.ENOSYS)]),
        *_if(_EQUAL, machine.clone3, [_give(_ERROR | errno.ENOSYS)]),  # its flags cannot be read; libc uses clone
    ]
    for number in refused:
        lines += _if(_EQUAL, number, [_give(_ERROR | errno.EPERM)])
    if not building:
        new = _if(_ANY_BIT, _NAMESPACES, [_give(_ERROR | errno.EPERM)])
        lines += _if(_EQUAL, machine.clone, [_load(_FIRST), *new, _give(_ALLOW)])
    other = _if_not(_EQUAL, _UNIX, [_give(_ERROR | errno.EACCES)])
    lines += _if(_EQUAL, machine.socket, [_load(_FIRST), *other, _give(_ALLOW)])
    typing = [line for request in _TERMINAL_INPUT for line in _if(_EQUAL, request, [_give(_ERROR | errno.EPERM)])]
    lines += _if(_EQUAL, machine.ioctl, [_load(_SECOND), *typing, _give(_ALLOW)])
    return [*lines, _give(_ALLOW)]


def _load(offset: int) -> bytes:
    return _INSTRUCTION.pack(_LOAD, 0, 0, offset)


def _give(verdict: int) -> bytes:
    return _INSTRUCTION.pack(_GIVE, 0, 0, verdict)


def _if(test: int, value: int, body: Sequence[bytes]) -> list[bytes]:
    """Return instructions that run the body if the test holds."""
    return [_INSTRUCTION.pack(test, 0, len(body), value), *body]


def _if_not(test: int, value: int, body: Sequence[bytes]) -> list[bytes]:
    """Return instructions that run the body unless the test holds."""
    return [_INSTRUCTION.pack(test, len(body), 0, value), *body]
