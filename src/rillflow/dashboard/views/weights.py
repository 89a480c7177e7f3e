"""Weights: the published versions of each policy with their sizes and probes, and the nodes' transfers.

An engine serves a version only after it has reproduced that version's probe: the log-probs that the trainer published
with it. The status of the run reports engines with wrong weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rillflow.dashboard.views.nodes import known_nodes
from rillflow.dashboard.watched import Live, WatchedRun
from rillflow.errors import RillflowError
from rillflow.types import NodeInfo
from rillflow.types.decoding import json_decoder
from rillflow.weights.manifest import HEAD, Line, VersionManifest, folder_name
from rillflow.weights.sealed import MANIFEST

_MOST_VERSIONS = 40  # of a policy: the latest
_TRANSFERS = ("loads", "delta_loads", "load_seconds", "pause_seconds", "pull_seconds", "pull_bytes")


def weights(run: WatchedRun, live: Live | None) -> dict[str, Any]:
    return {
        "live": live is not None,
        "policies": [_policy(run, policy) for policy in run.policies],
        "transfers": [row for node in known_nodes(run, live) for row in _transfers(run, node)],
        "troubles": [wait for wait in live.status.waits if "weights" in wait or "probe" in wait] if live else [],
    }


def _policy(run: WatchedRun, policy: str) -> dict[str, Any]:
    """The versions that lie in the weight store; older ones have made room."""
    folder = run.folder.weights(policy)
    try:
        line = json_decoder(Line).decode((folder / HEAD).read_bytes())
    except FileNotFoundError:
        return {"policy": policy, "head": None, "versions": [], "orphaned": 0}
    except (OSError, msgspec.MsgspecError) as error:
        return {"policy": policy, "head": None, "versions": [], "orphaned": 0, "unknown": f"head.json: {error}"}
    versions = [
        {
            "version": version,
            "full_bytes": entry.full_bytes,
            "delta_bytes": entry.delta_bytes,
            "delta_of": entry.delta_of,
            **_manifest(folder, version),
        }
        for version, entry in sorted(line.entries.items(), reverse=True)[:_MOST_VERSIONS]
    ]
    return {"policy": policy, "head": line.head, "versions": versions, "orphaned": len(line.orphaned)}


def _manifest(folder: Path, version: int) -> dict[str, Any]:
    """When the version was made, and its probe; nothing where it has been removed meanwhile."""
    try:
        found = json_decoder(VersionManifest).decode((folder / folder_name(version) / MANIFEST).read_bytes())
    except (OSError, msgspec.MsgspecError, RillflowError):
        return {"created": None, "parent": None, "probe": None}
    probe = found.probe
    told = None if probe is None else {"prompts": len(probe.prompts), "tolerance": probe.tolerance}
    return {"created": found.created, "parent": found.parent, "probe": told}


def _transfers(run: WatchedRun, node: NodeInfo) -> list[dict[str, Any]]:
    """Return the downloads of a node for each policy, from its heartbeat."""
    rows = []
    for policy in run.policies:
        if f"{policy}.loads" in node.stats:
            told = {name: node.stats.get(f"{policy}.{name}", 0.0) for name in _TRANSFERS}
            rows.append({"node": node.name, "policy": policy, "version": node.versions.get(policy), **told})
    return rows
