"""HTTP with msgpack bodies: one server base and one client base for every process of a run."""

from rillflow.wire.blocking import LoopThread, in_daemon, in_thread, take_short_turns
from rillflow.wire.client import Client
from rillflow.wire.server import Service

__all__ = ["Client", "LoopThread", "Service", "in_daemon", "in_thread", "take_short_turns"]
