"""The filter of system calls, run here instruction by instruction, for both machines."""

from __future__ import annotations

import errno
import struct

import pytest

from rillflow.agents.sandbox import isolation
from rillflow.agents.sandbox.isolation import MACHINES
from rillflow.errors import SandboxError

ALLOW, KILL = 0x7FFF0000, 0x80000000
_NEW_USER, _FORK = 0x10000000 | 17, 0x1200011
_READ = {"x86_64": 0, "aarch64": 63}


def answer(program: bytes, architecture: int, number: int, first: int = 0, second: int = 0) -> int:
    """Return the kernel's action for the call."""
    seen = struct.pack("<iIQ6Q", number, architecture, 0, first, second, 0, 0, 0, 0)
    lines = list(struct.iter_unpack("<HBBI", program))
    at, held = 0, 0
    while True:
        code, yes, no, value = lines[at]
        at += 1
        if code == 0x20:
            (held,) = struct.unpack_from("<I", seen, value)
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: held == value, 0x25: held > value, 0x45: bool(held & value)}[code]
            at += yes if holds else no


def refused(error: int) -> int:
    return 0x00050000 | error


@pytest.fixture(params=MACHINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_listed_calls_are_refused_and_others_are_not(name: str) -> None:
    machine, program = MACHINES[name], isolation.program(machine=name)
    for call, number in machine.calls.items():
        assert answer(program, machine.architecture, number) == refused(errno.EPERM), call
    assert answer(program, machine.architecture, _READ[name]) == ALLOW
    assert answer(program, machine.architecture, machine.newest) == ALLOW
    assert answer(program, machine.architecture, machine.newest + 1) == refused(errno.ENOSYS)
    assert answer(program, machine.architecture, machine.clone3) == refused(errno.ENOSYS)


def test_calls_of_another_machine_end_the_process(name: str) -> None:
    program = isolation.program(machine=name)
    for other in (0x40000003, 0xC000003E, 0xC00000B7, 0x40000028):
        if other != MACHINES[name].architecture:
            assert answer(program, other, _READ[name]) == KILL


def test_the_short_numbers_of_x32_are_no_way_around() -> None:
    machine, program = MACHINES["x86_64"], isolation.program(machine="x86_64")
    assert answer(program, machine.architecture, 0x40000000 | machine.calls["ptrace"]) == refused(errno.ENOSYS)


def test_arguments_are_looked_at(name: str) -> None:
    machine, program = MACHINES[name], isolation.program(machine=name)

    def ask(number: int, first: int = 0, second: int = 0) -> int:
        return answer(program, machine.architecture, number, first, second)

    assert ask(machine.clone, _FORK) == ALLOW
    assert ask(machine.clone, _NEW_USER) == refused(errno.EPERM)
    assert ask(machine.socket, 1) == ALLOW
    assert {ask(machine.socket, family) for family in (0, 2, 10, 16, 17, 38, 40)} == {refused(errno.EACCES)}
    assert ask(machine.ioctl, 0, 0x5413) == ALLOW
    assert ask(machine.ioctl, 0, 0x5412) == refused(errno.EPERM)


def test_what_builds_the_walls_may_build_and_nothing_else(name: str) -> None:
    machine, program = MACHINES[name], isolation.program(building=True, machine=name)
    allowed = {call for call, number in machine.calls.items() if answer(program, machine.architecture, number) == ALLOW}
    assert allowed == {"unshare", "mount", "sethostname"}
    assert answer(program, machine.architecture, machine.clone, _NEW_USER) == ALLOW
    assert answer(program, machine.architecture, machine.socket, 2) == refused(errno.EACCES)


def test_a_machine_without_numbers_is_refused() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        isolation.program(machine="riscv64")
