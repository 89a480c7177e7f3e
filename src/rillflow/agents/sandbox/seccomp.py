"""The filter of system calls: a program for the kernel's packet-filter machine, put together here.

What it refuses is what a program that computes never needs: new namespaces and mounts, other processes' memory, the
network (also the kinds of socket that a network namespace does not hold, such as vsock), kernel interfaces with a
history of faults, and memory that no limit counts. Calls from another architecture end the process; calls newer than
this list answer as if the kernel did not have them.

Not protected against: a fault in a system call that is allowed. The kernel is shared.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

from rillflow.agents.sandbox.syscalls import MACHINES, Machine
from rillflow.errors import SandboxError

_INSTRUCTION = struct.Struct("<HBBI")
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _GIVE = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in what the kernel shows of a call
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NAMESPACES = 0x7E020000  # the flags of clone that make new namespaces
_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into the terminal of another
# What the process that builds the walls needs before it gives it up.
_BUILDERS = ("unshare", "mount", "sethostname")


def program(*, building: bool = False, machine: str | None = None) -> bytes:
    """The filter for this machine; `building` leaves open what the walls are built with."""
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
    """Run the body where the test holds, else skip it."""
    return [_INSTRUCTION.pack(test, 0, len(body), value), *body]


def _if_not(test: int, value: int, body: Sequence[bytes]) -> list[bytes]:
    return [_INSTRUCTION.pack(test, len(body), 0, value), *body]
