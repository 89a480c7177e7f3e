"""Resets the connections of real processes, at both ends and without asking them, as a network that breaks does."""

from __future__ import annotations

import shutil
import socket
import subprocess

import psutil


def cut(process: psutil.Process) -> int:
    """Reset every connection of a process; how many there were."""
    there = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
    ports = sorted({connection.laddr.port for connection in there})
    if ports:
        wanted = " or ".join(f"sport = :{port}" for port in ports)
        subprocess.run(["ss", "-K", f"( {wanted} )"], capture_output=True, timeout=10, check=True)
    return len(there)


def can_cut() -> bool:
    """Return whether this kernel and this user can reset other processes' connections (root, and `ss` of iproute2)."""
    if not shutil.which("ss"):
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            subprocess.run(["ss", "-K", f"( dport = :{port} )"], capture_output=True, timeout=10, check=False)
            client.settimeout(0.5)
            try:
                client.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
    return False
