"""A process that fetches one file of weights: `python pulling_process.py URL CACHE VERSION NAME`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rillflow.weights.transport.sources import HttpSource
from weight_servers import KEY, POLICY, TOKEN


async def main(url: str, cache: str, version: str, name: str) -> None:
    source = HttpSource(f"{url}/{POLICY}", cache=Path(cache), key=KEY, token=TOKEN)
    try:
        await source.file(int(version), name)
        print(source.transfers[-1].bytes)
    finally:
        await source.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
