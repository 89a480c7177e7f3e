"""Lines of progress on a terminal, and silence of the packages that load models."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

_PLAIN_EVERY = 5.0


class LiveLine:
    """To be entered. Elsewhere than on a terminal a line that is `due` is shown at once; a `quiet` one never is."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal and not quiet else None
        self._printed = 0.0

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, line: str, *, due: bool, drawn: str = "") -> None:
        """`drawn` stands behind the line on a terminal."""
        if self._live is not None:
            self._live.update(Text.assemble((line, "bold"), (f"  {drawn}" if drawn else "", "green")))
        elif not self._quiet and (due or time.monotonic() - self._printed >= _PLAIN_EVERY):
            self._printed = time.monotonic()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def quieten() -> None:
    """Silence transformers; call before it is imported. Variables that are already set win."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
