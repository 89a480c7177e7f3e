"""How servers run: what is put into them, and those that somebody else has started."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from rillflow.errors import ConfigError

WEIGHTS_INSIDE = Path(__file__).resolve().parent / "inside"  # on the PYTHONPATH of every server
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def on_loopback(url: str) -> str:
    """The URL of a server on this machine. What goes to it is not encrypted, and who reaches it can change its weights:
    one elsewhere is reached through a tunnel that ends here."""
    if urlsplit(url).hostname not in _LOOPBACK:
        raise ConfigError(
            f"engine.server.url is {url}: not on this machine's loopback",
            "run the node beside the server, or open a tunnel (ssh -L 8000:127.0.0.1:8000 HOST) and name its near end",
        )
    return url.rstrip("/")
