"""Trackers: where the numbers of a run go while it runs, each fed by a thread or process that follows `metrics.jsonl`.

Invariants: no tracker can stall or end a run; a line reaches a tracker once (twice only if the process dies between
sending and noting it); what could not be sent stays in `metrics.jsonl`, is counted, and is sent by `rillflow resume`.
"""

from rillflow.observe.trackers.feed import Outcome, Tracked, Tracker
from rillflow.observe.trackers.registry import Trackers, check_trackers

__all__ = ["Outcome", "Tracked", "Tracker", "Trackers", "check_trackers"]
