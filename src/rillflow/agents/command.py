"""An agent that is an unchanged program, started once for each episode.

The program finds the gateway in the environment variables that OpenAI's and Anthropic's clients read, the task in a
file and the prompt's payload on standard input. Its result is its exit code, the end of its output and the file
`RILLFLOW_ANSWER`.

Invariants: the processes of an episode are one process group, which is killed when the episode ends, at its deadline
and when the node dies. The program gets only the variables in `PASSED` of the node's environment, and those of the
recipe. A program that writes without end fills neither memory nor disk. Each episode has its own home folder, so that
no client cache answers one episode with the text of another.

Not protected against: the program runs as the node's user and can read what that user can read, including the run
folder; a child that leaves the process group (`setsid`) is not killed. An untrusted agent belongs in a container, which
the command may start.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from rillflow.config.rollout import CommandConfig
from rillflow.contracts import Episode
from rillflow.engine.reaper import Reaper, kill_group
from rillflow.errors import ConfigError, WorkflowError

# What programs need to run. Keys, tokens and all other variables of our environment are not passed.
PASSED = (
    *("PATH", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
_DRAIN_SECONDS = 1.0  # to read the pipes after the program has ended
_SHOWN = 2000  # characters of standard error in the message of a failed episode
_BLOCK = 1 << 16
_LAST = 1.0  # seconds for a killed process to end


class AgentFailed(WorkflowError):
    """The program ended with an error: `code` is its exit code, or None if it could not be started."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class CommandAgent:
    """A workflow that runs the program: `await agent(episode)` returns what the program left.

    Each episode gets its own folder below `folder`, which is emptied of what an earlier node left.
    """

    def __init__(self, config: CommandConfig, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._words = words_of(config)
        self._folder = folder
        self._base = os.environ if environment is None else environment
        self._reaper = Reaper()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)  # files of another user's process stay

    async def __call__(self, episode: Episode) -> dict[str, Any]:
        place = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            write_task(episode, place)
            return await self._run(episode, place)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def close(self) -> None:
        """Kill all programs, and remove the folders of episodes that were given up."""
        self._reaper.close()
        for place in self._folder.glob("*"):
            shutil.rmtree(place, ignore_errors=True)

    async def _run(self, episode: Episode, place: Path) -> dict[str, Any]:
        environment = environment_of(episode, place, self._base) | self._config.environment
        async with Tail.open(self._config.output) as output, Tail.open(self._config.output) as errors:
            code = await self._until_it_ends(place, environment, output, errors)
            await asyncio.wait({output.task, errors.task}, timeout=_DRAIN_SECONDS)
        if code != 0:
            raise AgentFailed(f"the agent ended with code {code}: {errors.text()[-_SHOWN:].strip()}", code)
        answer = _read_answer(place / "answer", self._config.output)
        return {"returncode": code, "stdout": output.text(), "stderr": errors.text(), "answer": answer}

    async def _until_it_ends(self, place: Path, environment: dict[str, str], output: Tail, errors: Tail) -> int:
        """Run the program and return its exit code. The whole process group is gone afterwards."""
        with open(place / "payload.json", "rb") as payload:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=payload,
                    stdout=output.write,
                    stderr=errors.write,
                    cwd=self._config.folder or place / "work",
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise AgentFailed(f"the agent could not be started: {error}") from error
            finally:
                output.started()
                errors.started()
        try:
            self._reaper.watch(process.pid)
            return await process.wait()
        finally:
            kill_group(process.pid)
            self._reaper.forget(process.pid)
            with suppress(TimeoutError):  # so that the event loop, which may end now, has no process left
                async with asyncio.timeout(_LAST):
                    await process.wait()


def words_of(config: CommandConfig) -> list[str]:
    """Return the words of the command; ConfigError if the program does not exist."""
    try:
        words = shlex.split(config.run)
    except ValueError as error:
        raise ConfigError(f"command {config.run!r:.200}: {error}", "quote it as for a shell") from None
    if not words or shutil.which(words[0], path=search_path(os.environ)) is None:
        raise ConfigError(
            f"command: there is no program {words[0] if words else ''!r:.200}",
            "no shell reads the command: give a program in PATH, or an absolute path, and its arguments",
        )
    if config.folder is not None and not Path(config.folder).is_dir():
        raise ConfigError(f"command.folder: {config.folder} is not a folder", "make it, or leave it out")
    return words


def search_path(base: Mapping[str, str]) -> str:
    """Return a PATH in which `python` is the interpreter that runs Rillflow."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), base.get("PATH", os.defpath))))


def write_task(episode: Episode, place: Path) -> None:
    """Write the task and the payload into the episode's folder, and make its work and home folders."""
    task = {
        "prompt": {"id": episode.prompt.id, "payload": episode.payload},
        "policies": list(episode.policies),
        "model": episode.model,
        "seed": episode.seed,
        "seconds": episode.seconds_left(),
    }
    (place / "task.json").write_text(json.dumps(task))
    (place / "payload.json").write_text(json.dumps(episode.payload))
    (place / "work").mkdir()
    (place / "home").mkdir()


def environment_of(episode: Episode, place: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: the gateway and the task under the names that clients read."""
    session = unquote(episode.anthropic_url.rsplit("/", 1)[1])
    host = urlsplit(episode.base_url).hostname or ""
    unproxied = ",".join(filter(None, (base.get("NO_PROXY", base.get("no_proxy", "")), host)))
    return {name: base[name] for name in PASSED if name in base} | {
        "PATH": search_path(base),
        "HOME": str(place / "home"),
        "NO_PROXY": unproxied,
        "no_proxy": unproxied,
        "OPENAI_BASE_URL": episode.base_url,
        "OPENAI_API_KEY": episode.api_key,
        "OPENAI_MODEL": episode.model,
        "ANTHROPIC_BASE_URL": episode.anthropic_url,
        "ANTHROPIC_API_KEY": episode.api_key,
        "ANTHROPIC_MODEL": episode.model,
        "RILLFLOW_MODEL": episode.model,
        "RILLFLOW_SEED": str(episode.seed),
        "RILLFLOW_SESSION": session,
        "RILLFLOW_REWARD_URL": f"{episode.anthropic_url}/reward",
        "RILLFLOW_TASK": str(place / "task.json"),
        "RILLFLOW_ANSWER": str(place / "answer"),
    }


def _read_answer(path: Path, limit: int) -> str | None:
    """Return the end of the answer file; None if it does not exist or is not a regular file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                return None
            file.seek(max(0, about.st_size - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return None


class Tail:
    """The reading end of a pipe, of which the last bytes are kept.

    asyncio's own pipes hide the end of a program as long as one of its children holds the pipe.
    """

    def __init__(self, write: int, task: asyncio.Task[None], kept: bytearray) -> None:
        self.write = write
        self.task = task
        self._kept = kept

    @classmethod
    @asynccontextmanager
    async def open(cls, limit: int) -> AsyncIterator[Tail]:
        """Open a pipe and keep at most the last `limit` bytes."""
        try:
            read, write = os.pipe()
        except OSError as error:
            raise AgentFailed(f"the agent could not be started: {error}") from error
        file: IO[bytes] = os.fdopen(read, "rb", 0)
        reader = asyncio.StreamReader()
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
        except BaseException:
            file.close()
            os.close(write)
            raise
        kept = bytearray()
        tail = cls(write, asyncio.create_task(_follow(reader, kept, limit)), kept)
        try:
            yield tail
        finally:
            tail.started()
            tail.task.cancel()
            transport.close()

    def started(self) -> None:
        """Close our copy of the writing end: the program has its own now, or never will."""
        write, self.write = self.write, -1
        if write >= 0:
            os.close(write)

    def text(self) -> str:
        """Return the kept bytes as text."""
        return self._kept.decode(errors="replace")


async def _follow(reader: asyncio.StreamReader, kept: bytearray, limit: int) -> None:
    """Keep at most the last `limit` bytes."""
    while block := await reader.read(_BLOCK):
        kept += block
        del kept[: max(0, len(kept) - limit)]
