"""Code inside sees none of our files, reaches nothing outside, and has bounded resources."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rillflow.agents.sandbox import Sandbox, SandboxConfig
from rillflow.agents.sandbox.isolation import MACHINES
from rillflow.errors import SandboxError

_LIBC = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *arguments):
    result = getattr(libc, name)(*arguments)
    return result == -1 and errno.errorcode.get(ctypes.get_errno())
"""


def told(sandbox: Sandbox, code: str) -> Any:
    """Return the JSON in a program's last line."""
    result = sandbox.run_sync(code)
    assert result.status == "ok", result
    return json.loads(result.stdout.splitlines()[-1])


def test_a_program_is_nobody_in_namespaces_of_its_own_and_can_never_be_more(sandbox: Sandbox) -> None:
    code = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    "user": [os.getuid(), os.geteuid(), os.getgid()], "groups": os.getgroups(), "pid": os.getpid(),
    "rights": [status[key].strip() for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "never": status["NoNewPrivs"].strip(), "filter": status["Seccomp"].strip(), "host": os.uname().nodename,
    "spaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in ("user", "pid", "net", "ipc", "uts", "mnt")},
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
}))
"""
    first, second = told(sandbox, code), told(sandbox, code)
    assert first["user"] == [65534] * 3
    assert set(first["groups"]) <= {65534}
    assert first["pid"] == 1
    assert set(first["rights"]) == {"0000000000000000"}
    assert first["never"] == "1"
    assert first["filter"] == "2"
    assert first["processes"] == ["1"]
    assert first["host"] == "sandbox"
    for name, space in first["spaces"].items():
        assert space != os.readlink(f"/proc/self/ns/{name}")
        assert space != second["spaces"][name] or name in ("user", "net")  # numbers may be given out again


@pytest.mark.needs("root")
def test_to_the_kernel_a_sandbox_of_root_is_not_root(sandbox: Sandbox) -> None:
    mounts = told(sandbox, "import json\nprint(json.dumps(open('/proc/self/mounts').read().splitlines()))")
    (private,) = [line for line in mounts if line.startswith("tmpfs /tmp ")]
    assert re.search(r"uid=19\d{8}\b", private)  # the kernel's number of the owner


@pytest.mark.needs("bubblewrap")
def test_the_environment_is_empty_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "key")
    with Sandbox() as opened:
        names = told(opened, "import json, os\nprint(json.dumps(sorted(os.environ)))")
    assert "SECRET_OF_OURS" not in names
    assert set(names) >= {"HOME", "PATH"}


def test_files_of_ours_are_not_there_and_the_system_is_read_only(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    code = f"""
import json, os
def fails(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
places = ["/", "/usr", "/usr/bin", "/etc", "/dev", "/opt", "/opt/sandbox/inside", os.path.dirname(os.__file__), "/proc"]
os.symlink({str(secret)!r}, "link")
print(json.dumps({{
    "secret": fails(lambda: open({str(secret)!r})), "link": fails(lambda: open("link")),
    "shadow": fails(lambda: open("/etc/shadow")), "up": fails(lambda: open("/proc/1/root/../../etc/shadow")),
    "written": [place for place in places if not fails(lambda: open(place + "/mine", "w"))],
    "changed": fails(lambda: os.chmod("/usr/bin", 0o777)), "host": os.listdir("/"),
}}))
"""
    seen = told(sandbox, code)
    assert seen["secret"] == seen["link"] == seen["shadow"] == "FileNotFoundError"
    assert seen["up"]
    assert seen["written"] == []
    assert seen["changed"]
    assert set(seen["host"]).isdisjoint({"home", "work", "var", "run", "srv", "sys", "boot"} - _parents())


def _parents() -> set[str]:
    """The folder of this Python has to be visible, with the folders above it."""
    return {Path(sys.base_prefix).resolve().parts[1]}


def test_there_is_no_network(sandbox: Sandbox) -> None:
    code = """
import json, socket
def kind(family, type=socket.SOCK_STREAM):
    try:
        socket.socket(family, type).close()
        return True
    except OSError as error:
        return False
others = [socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, 38]
try:
    socket.create_connection(("127.0.0.1", 80), timeout=5)
    reached = True
except OSError:
    reached = False
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").read().splitlines()[2:]]
print(json.dumps([kind(socket.AF_UNIX), [kind(family) for family in others], reached, devices]))
"""
    unix, others, reached, devices = told(sandbox, code)
    assert unix
    assert not any(others)
    assert not reached
    assert devices == ["lo"]


def test_calls_that_make_or_break_walls_are_refused(sandbox: Sandbox) -> None:
    code = (
        _LIBC
        + """
print(json.dumps({
    "ptrace": refused("ptrace", 0, 0, 0, 0), "unshare": refused("unshare", 0x10000000),
    "mount": refused("mount", b"none", b"/tmp", b"tmpfs", 0, None), "umount": refused("umount2", b"/tmp", 2),
    "chroot": refused("chroot", b"/tmp"), "setns": refused("setns", 0, 0), "setuid": refused("setuid", 0),
    "setgid": refused("setgid", 0), "reading others": refused("process_vm_readv", 1, None, 0, None, 0, 0),
    "memory that is not counted": refused("memfd_create", b"x", 0),
    "shared memory": refused("shmget", 0, 1 << 30, 0o1600),
    "semaphores": refused("semget", 0, 1, 0o1600), "messages": refused("msgget", 0, 0o1600),
    "personality": refused("personality", 0x40000), "clock": refused("settimeofday", b"\\0" * 16, None),
    "hostname": refused("sethostname", b"x", 1), "keys": refused("syscall", ctypes.c_long(KEYCTL), 0, 0, 0, 0, 0),
    "new namespace by clone": refused("syscall", ctypes.c_long(CLONE), ctypes.c_long(0x10000011), 0, 0, 0, 0),
    "clone3": refused("syscall", ctypes.c_long(435), 0, 0), "io_uring": refused("syscall", ctypes.c_long(425), 1, 0),
    "newer than the filter": refused("syscall", ctypes.c_long(451), 0, 0),
}))
"""
    )
    machine = MACHINES[os.uname().machine]
    numbers = {"KEYCTL": machine.calls["keyctl"], "CLONE": machine.clone}
    for name, number in numbers.items():
        code = code.replace(name, str(number))
    answers = told(sandbox, code)
    missing = {name for name in ("clone3", "newer than the filter") if answers.pop(name) == "ENOSYS"}
    assert missing == {"clone3", "newer than the filter"}
    assert {answers.pop("setuid"), answers.pop("setgid")} == {"EINVAL"}  # user 0 does not exist inside
    assert {name: answer for name, answer in answers.items() if answer != "EPERM"} == {}


def test_programs_that_carry_rights_give_none(sandbox: Sandbox) -> None:
    code = """
import json, os, subprocess
tried = []
for name in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/passwd", "/usr/bin/newgrp"):
    if os.path.exists(name):
        tried.append(subprocess.run([name, "--version"], capture_output=True).returncode)
user = subprocess.run(["/usr/bin/id", "-u"], capture_output=True, text=True).stdout.strip()
flags = os.statvfs("/usr").f_flag & os.ST_NOSUID
print(json.dumps([user, bool(flags)]))
"""
    assert told(sandbox, code) == ["65534", True]


def test_processes_are_counted_for_each_sandbox(sandbox: Sandbox) -> None:
    code = """
import json, os, time
made = 0
for _ in range(100):
    try:
        if os.fork() == 0:
            time.sleep(100)
    except OSError:
        break
    made += 1
print(json.dumps(made))
"""
    assert [told(sandbox, code) for _ in range(2)] == [sandbox.config.processes - 1] * 2


def test_memory_files_and_descriptors_are_bounded(sandbox: Sandbox) -> None:
    code = """
import json, os
def until_refused(act, most):
    for count in range(most):
        try:
            act(count)
        except (OSError, MemoryError) as error:
            return count, type(error).__name__
    return most, None
def fill(folder):
    def write(count):
        with open(f"{folder}/{count}", "wb") as file:
            file.write(bytes(1 << 20))
    return write
held = []
one = open("/tmp/long", "wb")
print(json.dumps({
    "one file": until_refused(lambda count: one.write(bytes(1 << 20)) and one.flush(), 400),
    "tmp": (os.unlink("/tmp/long"), one.close(), until_refused(fill("/tmp"), 400))[2],
    "shm": until_refused(fill("/dev/shm"), 400),
    "memory": until_refused(lambda count: held.append(bytearray(1 << 20)), 4000), "free": held.clear(),
    "open": until_refused(lambda count: held.append(open("/dev/null")), 4000),
}))
"""
    seen = told(sandbox, code)
    for place in ("one file", "tmp", "shm"):
        assert 0 < seen[place][0] <= sandbox.config.disk
        assert seen[place][1] == "OSError"
    assert 0 < seen["memory"][0] <= sandbox.config.memory
    assert seen["memory"][1] == "MemoryError"
    assert seen["open"][0] <= 64


def test_the_number_of_files_is_bounded(sandbox: Sandbox) -> None:
    most = sandbox.config.disk * 256  # one for each page
    code = f"""
import json, os
def made(folder):
    for count in range({most} + 1):
        try:
            os.close(os.open(f"{{folder}}/{{count}}", os.O_CREAT | os.O_WRONLY))
        except OSError:
            return count
print(json.dumps([made("/tmp"), made("/dev/shm")]))
"""
    assert all(most // 2 < count < most for count in told(sandbox, code))


def test_where_bubblewrap_is_missing_nothing_runs_and_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"not installed[\s\S]*apt install bubblewrap"):
        Sandbox().open()


def test_where_bubblewrap_may_not_do_its_work_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("bwrap", "setpriv", "unshare", "mount"):
        refusing = tmp_path / name
        refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"No permissions[\s\S]*user namespaces"):
        Sandbox().open()


@pytest.mark.needs("bubblewrap")
def test_packages_are_shown_by_name_only() -> None:
    code = "import numpy, json\nprint(json.dumps([int(numpy.arange(4).sum()), numpy.__file__]))"
    with Sandbox(SandboxConfig(packages=("numpy",), memory=1024, pool=1)) as opened:
        assert told(opened, code) == [6, "/opt/packages/numpy/__init__.py"]
        assert opened.run_sync("import msgspec").status == "error"
