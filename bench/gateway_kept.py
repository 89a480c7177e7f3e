"""What a session costs the gateway besides answering: bytes on disk, and time spent on tokenising.

`kept`: a session of 20 turns in our log against one row for each call. Each row is in the very encoding of our log (a
frame with the given node, here all of the prompt: its ids and messages, and the sampled node: ids, log-probs,
versions, message) and stands for itself, as stores of requests and responses have it. Neither has tools or keys.

`retokenising`: the share of a session's time on the embedded engine, with the tiny policy, that finding, rendering and
encoding the prompts takes; beside it, the same for rendering and encoding every prompt from its first message.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from rillflow.engine.embedded import EmbeddedEngine
from rillflow.gateway import Policy, Renderer, Sessions, calls
from rillflow.gateway.sessions import events
from rillflow.gateway.sessions.events import Asked
from rillflow.gateway.sessions.session import Session
from rillflow.gateway.sessions.session_log import FileSessionLog
from rillflow.gateway.trees.matching import Place
from rillflow.gateway.trees.messages import Message, message
from rillflow.gateway.trees.tree import Node, TokenTree
from rillflow.storage.frame_log import Frame, columns_of
from rillflow.storage.records import seal
from rillflow.types import Chunk, GenerateRequest, Sampling
from rillflow.weights.models import load_policy_model, pick_device

ANSWER, RESULT = 48, 120  # tokens of an answer, words of what an agent says to it
TOKENS, SAID = 32, 12  # the same where the embedded engine answers, which may end before


class Fixed:
    """An engine that says the same tokens at once."""

    context = 1 << 20

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    async def generate(self, request: GenerateRequest) -> Any:
        logprobs = [-0.001 * place for place in range(len(self._ids))]
        yield Chunk(tokens=self._ids, logprobs=logprobs, raw_logprobs=logprobs, version=3, finish="stop")


def words(count: int, start: int) -> str:
    names = ("bolt", "washer", "spring", "crate", "label", "north shelf", "bin", "pallet")
    return " ".join(f"{names[(start + place) % 8]} {start + place}" for place in range(count // 2))


async def play(session: Session, policy: Policy, turns: int, *, max_tokens: int, said: int) -> None:
    """One conversation, as an agent with one task and tools that answer at length."""
    history: list[Message] = [message("system", "You keep the stockroom."), message("user", words(60, 0))]
    for turn in range(turns):
        call = calls.Call("policy", list(history), None, b"", Sampling(max_tokens=max_tokens))
        answer = calls.begin(session, policy, call, f"call-{turn}", 0)
        await answer.whole()
        history += [answer.choices[0].node.messages[0], message("user", words(said, turn))]


def row_bytes(node: Node, tree: TokenTree) -> int:
    """A call as a row of its own: all of its prompt, then its answer."""
    above = node.parent
    assert above is not None
    whole = Node(above.id, "given", above.parent)
    whole.tokens = above.tokens[:0]
    whole.tokens.fromlist(above.prompt())
    whole.messages = tuple(said for before in above.path() for said in before.messages)
    pieces = [events.piece_of(whole, tree), events.piece_of(node, tree)]
    payload = events.answered(Asked(node.call, "policy", 0), 1, node, pieces)
    return seal(columns_of(Frame(0, events.Kind.ANSWERED, payload))).length


async def kept(turns: int = 20) -> tuple[int, int]:
    """Bytes of our log, all of it, and of one row for each call."""
    renderer = Renderer.load("tiny")
    ids = [*renderer.encode(words(ANSWER, 3))[: ANSWER - 1], renderer.stop_tokens[0]]
    with tempfile.TemporaryDirectory() as name:
        log = FileSessionLog(Path(name))
        sessions = Sessions("secret", log=log)
        sessions.restore()
        sessions.open("session", seed=1, group="group", deadline_seconds=600)
        session = sessions.get("session")
        await play(session, Policy(Fixed(ids), renderer), turns, max_tokens=ANSWER, said=RESULT)
        await log.close()
        mine = sum(path.stat().st_size for path in Path(name).glob("*.seg"))
    tree = session.trees["policy"]
    answers = [node for node in tree.nodes() if node.kind == "sampled"]
    assert len(answers) == turns
    return mine, sum(row_bytes(node, tree) for node in answers)


def tiny_engine(context: int) -> EmbeddedEngine:
    """Return the tiny policy with a longer context than it was trained with; its answers do not matter here."""
    model = load_policy_model("tiny", "fp32", pick_device("cpu"))
    model.config.max_position_embeddings = context
    return EmbeddedEngine(model, version=0, slots=2, context=context, queue=16, exact=False)


class Clocked:
    """Counts the seconds in which the gateway finds, renders and encodes prompts."""

    def __init__(self, renderer: Renderer) -> None:
        self.seconds = self.anew = 0.0
        self._renderer = renderer

    def place(self, *arguments: Any, **options: Any) -> Place:
        """Return a place that was rendered, as `calls` makes it."""
        started = time.perf_counter()
        found = Place(*arguments, **options)
        found.render()
        self.seconds += time.perf_counter() - started
        return found

    def tokenise(self, history: list[Message]) -> None:
        started = time.perf_counter()
        self._renderer.encode(self._renderer._text([said.body for said in history], None, prompt=True))
        self.anew += time.perf_counter() - started


async def retokenising(turns: int) -> tuple[float, float]:
    """Shares of the time, in percent: ours, and of tokenising everything again for every call."""
    renderer = Renderer.load("tiny")
    engine = tiny_engine(context=128 * turns + 512)
    await engine.start()
    clocked = Clocked(renderer)
    calls.Place = clocked.place  # type: ignore[assignment, misc]
    try:
        sessions = Sessions("secret")
        sessions.open("session", seed=1, group="group", deadline_seconds=600)
        session = sessions.get("session")
        started = time.perf_counter()
        await play(session, Policy(engine, renderer), turns, max_tokens=TOKENS, said=SAID)
        seconds = time.perf_counter() - started
    finally:
        calls.Place = Place  # type: ignore[misc]
        await engine.close()
    leaf = session.trees["policy"].leaves()[-1]
    history = [said for node in leaf.path() for said in node.messages]
    for end in range(2, len(history), 2):
        clocked.tokenise(history[:end])
    return 100 * clocked.seconds / seconds, 100 * clocked.anew / (seconds - clocked.seconds + clocked.anew)


if __name__ == "__main__":
    print("bytes", asyncio.run(kept()))
    for count in (8, 128):
        print("retokenising, %", count, asyncio.run(retokenising(count)))
