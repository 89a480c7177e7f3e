"""Runs in the trackers' environment: feed W&B of a run folder, whose server takes connections and answers nothing.

    python silent.py RUN

Prints, as JSON, what a person would have been told, and ends as `rillflow run` does.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from rillflow.observe.trackers import Trackers
from rillflow.runtime.folder import RunFolder

SECONDS = 60.0


def main() -> None:
    folder = RunFolder.open(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": "a" * 40}
        trackers = Trackers(folder)
        trackers.start()
        server.settimeout(SECONDS)
        with server.accept()[0]:  # it has begun to ask
            print(json.dumps(trackers.close("finished", 2.0)))


if __name__ == "__main__":
    main()
