"""`rillflow maintain`: the loop, or the MCP server that an agent maintains a run with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rillflow.cli.status import to_join
from rillflow.clients.joining import token_of
from rillflow.errors import ConfigError
from rillflow.resources.maintainer.state import Line
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.maintaining import maintainer, maintainer_role, place_at, place_of
from rillflow.runtime.process import prepare, run_until_signal
from rillflow.runtime.roles import PREDECESSOR_WAIT

_COLOURS = {"grow": "yellow", "shrink": "yellow", "failed": "red", "died": "red", "refused": "red", "joined": "green"}


def maintain(
    folder: Path | None,
    *,
    join: str | None = None,
    state: Path | None = None,
    token_file: Path | None = None,
    dry_run: bool = False,
    mcp: bool = False,
    port: int | None = None,
) -> int:
    """The exit code: 0 once the run has ended."""
    if (folder is None) == (join is None):
        raise ConfigError("give a run folder, or --join URL", "rillflow maintain runs/…; rillflow maintain --join URL")
    if port is not None and not mcp:
        raise ConfigError("--port is where an MCP server listens", "give --mcp with it")
    opened = to_join(folder) if folder is not None else None
    if opened is not None and not mcp:
        return maintainer_role(opened, dry_run=dry_run, say=_printer(dry_run))
    home = opened or RunFolder(_state_folder(state, str(join)).resolve())
    token = token_of(token_file) if opened is None else ""

    async def main() -> None:
        place = await (place_of(opened) if opened is not None else place_at(str(join), token, home.root))
        # On stdio the client would read printed lines as answers.
        say = _printer(dry_run) if not mcp else lambda line: None
        async with maintainer(place, dry_run=dry_run, follow=not mcp, say=say) as made:
            if not mcp:
                await made.run()
            elif port is None:
                from rillflow.resources.mcp import serve_stdio

                await serve_stdio(made)
            else:
                from rillflow.resources.mcp import serve_http

                await serve_http(made, place.token, port, lambda url: _listens(home, url))

    prepare()
    with home.locked("maintainer", PREDECESSOR_WAIT):
        return run_until_signal(main())


def _state_folder(state: Path | None, url: str) -> Path:
    if state is None:
        raise ConfigError(
            "a maintainer that joins by URL needs a folder to remember what it has started",
            f"rillflow maintain --join {url} --state DIR",
        )
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    return state


def _listens(home: RunFolder, url: str) -> None:
    (home.root / "endpoints").mkdir(exist_ok=True)
    home.publish_endpoint("maintainer", url)
    Console(stderr=True).print(f"the maintainer's MCP server: {url} (Authorization: Bearer TOKEN)", soft_wrap=True)


def _printer(dry_run: bool) -> Callable[[Line], None]:
    """Return a function that prints decisions on a terminal; elsewhere the log has them."""
    console = Console(file=sys.stdout, quiet=not (dry_run or sys.stdout.isatty()))

    def say(line: Line) -> None:
        report = f"report {line.version}: " if line.version >= 0 else ""
        nodes = f" [{', '.join(line.nodes)}]" if line.nodes else ""
        dry = "would " if line.dry_run and line.action in ("grow", "shrink") else ""
        action = (f"{dry}{line.action}", _COLOURS.get(line.action, ""))
        console.print(Text.assemble(report, action, f": {line.why}{nodes}"), soft_wrap=True, highlight=False)

    return say
