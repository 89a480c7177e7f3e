"""The process of one tracker: `python -m rillflow.observe.trackers RUN NAME`, started by `registry.ChildTracker`."""

from __future__ import annotations

import json
import os
import sys
from typing import get_args

from rillflow.observe.trackers.feed import Outcome
from rillflow.observe.trackers.registry import CLOSING, feed_of
from rillflow.runtime.folder import RunFolder

_NICE = 10  # no one waits for it
_PARENT = 3600.0  # seconds: the parent has a deadline, and kills this process at it


def main() -> None:
    os.nice(_NICE)
    # The output of packages goes to the log, with their errors.
    news = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    folder, name = RunFolder.open(sys.argv[1]), sys.argv[2]
    feed = feed_of(folder, name, lambda text: print(json.dumps(text), file=news, flush=True))
    feed.start()
    said = sys.stdin.readline().strip()  # nothing if the parent was killed
    feed.stop(next((outcome for outcome in get_args(Outcome) if outcome == said), "stopped"))
    feed.join(_PARENT if said else CLOSING)


if __name__ == "__main__":
    main()
