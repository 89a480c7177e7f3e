"""The app, the options that commands share, and errors shown without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from rillflow.errors import CheckpointError, ConfigError, DataError, GraphError, RillflowError
from rillflow.runtime.process import GIVE_UP, GiveUp, leave

app = typer.Typer(
    name="rillflow",
    help="Train agentic language models with reinforcement learning.\n\nStart with: rillflow run quickstart",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
errors = Console(stderr=True)
# A restart cannot mend these.
_FOR_GOOD = (ConfigError, DataError, CheckpointError, GraphError, GiveUp)
RunArgument = Annotated[Path, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="RUN")]
MaybeRun = Annotated[Path | None, typer.Argument(help="A run folder, such as runs/quickstart-…", metavar="[RUN]")]
JoinOption = Annotated[str | None, typer.Option(help="Instead: where the run's service listens", metavar="URL")]
TokenOption = Annotated[
    Path | None, typer.Option(help="With --join: a token of the run", show_default="RILLFLOW_TOKEN", dir_okay=False)
]
CacheOption = Annotated[
    Path | None,
    typer.Option(help="With --join: keeps sessions and weights", show_default="nothing is kept", file_okay=False),
]
KeptOption = Annotated[
    Path | None,
    typer.Option(help="With --join, required: keeps what it must not lose", show_default=False, file_okay=False),
]
HostOption = Annotated[str, typer.Option(help="With --join: the address to listen on")]
RuntimeOption = Annotated[
    Literal["local", "ray"], typer.Option("--runtime", help="Where: on this machine, or on a Ray cluster")
]
AddressOption = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster, HOST:PORT", show_default="RAY_ADDRESS, else one is started here"),
]
DashboardOption = Annotated[
    bool, typer.Option("--dashboard/--no-dashboard", help="Offer a dashboard on loopback; it starts when it is opened")
]


def one_run(folder: Path | None, join: str | None) -> Path | None:
    """Return the given run folder, or None if a URL was given."""
    if (folder is None) == (join is None):
        raise ConfigError("give a run folder, or --join URL", "RUN/endpoints/dataflow.json says where a run listens")
    return folder


@contextmanager
def clear_errors(*, role: bool = False) -> Iterator[None]:
    """Print an error and what to do. A role's exit code tells its supervisor whether a restart can help."""
    try:
        yield
    except RillflowError as error:
        # Not wrapped, so that paths can be copied.
        errors.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
        if advice := error.hint or error.advice:
            errors.print(Text.assemble(("what to do: ", "bold"), advice), soft_wrap=True)
        code = GIVE_UP if role and isinstance(error, _FOR_GOOD) else 2
        if role and _has_peers():
            leave(code)
        raise typer.Exit(code) from None


def _has_peers() -> bool:
    """Return whether this process is one rank of several: torch's threads that serve the others abort an ordinary
    exit."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
