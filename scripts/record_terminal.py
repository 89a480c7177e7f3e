"""Draw what commands print, as a terminal: `python -m scripts.record_terminal OUT.svg "COMMAND" …`.

Each command is really run; its output becomes a part of one SVG of 100 columns.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100


def main(out: str, *commands: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in commands:
        environment = os.environ | {"COLUMNS": str(WIDTH)}
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=True)
        console.print(Text("$ ", "bold green") + Text(command, "bold"))
        console.print(Text(done.stdout + done.stderr))
    drawn = console.export_svg(title="rillflow")
    Path(out).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # no font from the network


if __name__ == "__main__":
    main(*sys.argv[1:])
