"""The filter of system calls: a seccomp program in the kernel's packet-filter language.

It refuses what a computing program never needs: new namespaces and mounts, the memory of other processes, the network
(also sockets that a network namespace does not contain, such as vsock), kernel interfaces with a history of faults, and
memory that no limit counts. Calls of another architecture kill the process; calls newer than this list fail with
ENOSYS.

Not protected against: a fault in a permitted system call. The kernel is shared.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rillflow.errors import SandboxError

_INSTRUCTION = struct.Struct("<HBBI")
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _GIVE = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NAMESPACES = 0x7E020000  # the flags of clone that make new namespaces
_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: input into another's terminal
# What the isolating process needs before it gives up its rights.
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
