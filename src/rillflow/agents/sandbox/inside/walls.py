"""The isolation of one run, set up by the process itself: namespaces, mounts, capabilities, limits, system calls.

Nothing here needs privileges: the process owns its new user namespace until it gives that up. After `give_up` no step
can be undone: no_new_privs is set, the capabilities are dropped, the hard limits cannot be raised, and the filter
refuses the calls that set up the isolation.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 22, 24
_PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_SECCOMP_MODE_FILTER, _AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION = 0x20080522
_SIGKILL = 9
NOBODY = 65534
Limits = dict[str, int]


def new_namespaces() -> None:
    """Unshare all namespaces in one call; the next fork becomes process 1 of the new process namespace."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
    _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    _write("/proc/self/oom_score_adj", "1000")


def new_mounts(disk: int) -> None:
    """Mount an empty /tmp and /dev/shm of bounded size, and a /proc of the new process namespace.

    The number of files is bounded too, because an empty file takes kernel memory that no size limit counts.
    """
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    bounds = b"mode=0700,size=%d,nr_inodes=%d" % (disk, max(disk // 4096, 64))
    for place in (b"/tmp", b"/dev/shm"):
        _call("mount", b"tmpfs", place, b"tmpfs", _MS_NOSUID | _MS_NODEV, bounds)
    _call("sethostname", b"sandbox", 7)
    _write("/proc/sys/user/max_user_namespaces", "0")


def set_limits(limits: Limits, *, alone: bool) -> None:
    """Set hard limits. The kernel counts processes by user and user namespace, so their number is limited only for a
    run that has its own namespace (`alone`)."""
    wanted = {
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["disk"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if alone:
        wanted[resource.RLIMIT_NPROC] = limits["processes"] + 1  # the keeper counts too
    for kind, value in wanted.items():
        resource.setrlimit(kind, (value, value))


def limit_processor(seconds: float) -> None:
    """Limit the processor time, in addition to the deadline that is enforced from outside."""
    whole = int(seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))


def give_up(program: bytes) -> None:
    """Drop all capabilities and load the filter of system calls."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # beyond the last capability of this kernel
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _call("capset", header, none)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Program.of(program)), 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of orphaned processes, so that they can be found and killed."""
    _call("prctl", _PR_SET_SUBREAPER, 1, 0, 0, 0)


class _Program(ctypes.Structure):
    """`struct sock_fprog`: the number of instructions of eight bytes, and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    @classmethod
    def of(cls, program: bytes) -> _Program:
        return cls(len(program) // 8, program)


def _call(name: str, *arguments: Any) -> None:
    typed = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(_LIBC, name)(*typed) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
