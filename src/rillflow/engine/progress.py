"""How far an answer is that may be cut and continued, here or elsewhere."""

from __future__ import annotations

import msgspec

from rillflow.types import Chunk, FinishReason, GenerateRequest


class Progress:
    """How far a call is: what it has produced and what is still to be asked for."""

    def __init__(self, request: GenerateRequest, context: int) -> None:
        self.produced: list[int] = []
        self.cuts = 0  # since the last token
        self.losses = 0  # of them, those by an engine that was lost
        self.cause = ""
        self._request = request
        self._context = context

    def take(self, chunk: Chunk) -> Chunk:
        """The chunk as the caller gets it."""
        if not chunk.tokens:
            return chunk
        seam = self.cause if self.cause and self.produced else chunk.seam
        self.produced += chunk.tokens
        self.cause, self.cuts, self.losses = "", 0, 0
        return chunk if seam == chunk.seam else msgspec.structs.replace(chunk, seam=seam)

    def rest(self) -> GenerateRequest:
        if not self.produced:
            return self._request
        asked = self._request.sampling
        sampling = msgspec.structs.replace(asked, max_tokens=asked.max_tokens - len(self.produced))
        return msgspec.structs.replace(
            self._request,
            tokens=[*self._request.tokens, *self.produced],
            sampling=sampling,
            begun=self._request.begun + len(self.produced),
        )

    def over(self) -> FinishReason | None:
        """How it has ended, where it was cut after its last token but before anyone said so."""
        if not self.produced:
            return None
        asked = self._request.sampling
        if self.produced[-1] in asked.stop_tokens:
            return "stop"
        full = len(self._request.tokens) + len(self.produced) >= self._context
        return "length" if full or len(self.produced) >= asked.max_tokens else None
