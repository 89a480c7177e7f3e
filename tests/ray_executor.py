"""One action of a maintainer on Ray, each in a process of its own: `ray_executor.py RUN start|stop|nodes [NODE]`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rillflow.resources.ray_executor import RayExecutor
from rillflow.runtime.folder import RunFolder


async def main(root: str, action: str, *node: str) -> None:
    folder = RunFolder.open(root)
    executor = RayExecutor.of(Path(root), str(folder.endpoint("dataflow")), folder.token)
    try:
        print(json.dumps(await getattr(executor, action)(*node)))
    finally:
        await executor.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
