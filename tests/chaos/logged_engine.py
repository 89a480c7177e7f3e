"""An engine process as `rillflow engine` starts it, which also writes down every token that it hands out.

A line is on its way to the disk before the tokens are on theirs to the gateway, so a kill loses no line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rillflow.engine.host import EngineHost
from rillflow.runtime.folder import RunFolder
from rillflow.runtime.roles import engine_role
from rillflow.types import Chunk, GenerateRequest


def main(folder: str, name: str, log: str) -> int:
    plain = EngineHost.frames
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def frames(
        self: EngineHost, policy: str, request: GenerateRequest, *options: Any
    ) -> AsyncGenerator[Chunk | None]:
        place = len(request.tokens)
        async with aclosing(plain(self, policy, request, *options)) as stream:
            async for chunk in stream:
                if chunk is not None and chunk.tokens:
                    line = json.dumps([request.id, place, chunk.version, chunk.tokens])
                    os.write(file, line.encode() + b"\n")
                    place += len(chunk.tokens)
                yield chunk

    EngineHost.frames = frames  # type: ignore[method-assign]
    return engine_role(RunFolder.open(Path(folder)), name)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
