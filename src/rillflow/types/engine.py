"""Engines: token ids in, chunks out."""

from __future__ import annotations

from typing import Literal

from rillflow.types.base import Finite, Wire

FinishReason = Literal["stop", "length", "abort"]
LOWEST_TEMPERATURE = 0.01  # above 0: vLLM draws at this one where a lower one is asked for


class Grammar(Wire, frozen=True):
    """The form of a whole answer: a JSON schema (as JSON), a regular expression, or a grammar in llguidance's dialect
    of Lark."""

    kind: Literal["json", "regex", "lark"]
    text: str


class Sampling(Wire, frozen=True):
    """How tokens are drawn. A `temperature` of 0 takes the likeliest token; others are at least LOWEST_TEMPERATURE.
    `top_k` 0 and `top_p` 1 switch those cuts off; `seed` None draws a fresh one.

    With a `grammar` only tokens are drawn that keep it satisfiable, and an answer stops only when it is satisfied.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None
    grammar: Grammar | None = None


class GenerateRequest(Wire, frozen=True):
    """A prompt as token ids. `group` lets an engine find requests that share their prompt. The last `begun` tokens
    belong to the answer, if an answer that was cut goes on."""

    id: str
    tokens: list[int]
    sampling: Sampling
    group: str = ""
    begun: int = 0


class Chunk(Wire, frozen=True):
    """Tokens out, all sampled by one `version`. The stop token, when sampled, is part of `tokens`.

    `logprobs` are of the distribution that was sampled from, `raw_logprobs` of the model's own: untempered, uncut and
    without a grammar. Both are finite. `seam` says why sampling was cut before the first of these tokens and went on
    from the ids produced so far; empty where it was not.
    With the last chunk of an answer come the `experts` that a mixture chose for each token of the sequence but the
    last, if they are recorded (`engine.experts`).
    """

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    version: int
    finish: FinishReason | None = None
    seam: str = ""
    experts: bytes = b""


class Probe(Wire, frozen=True):
    """The trainer's log-probs of a version: of every token of `prompts` but the first of each.

    An engine that holds these weights reproduces them within `tolerance`, a share of their spread (`weights.probe`).
    """

    prompts: list[list[int]]
    logprobs: list[list[Finite]]
    tolerance: Finite


class EngineStats(Wire, frozen=True):
    version: int
    running: int
    waiting: int
    slots: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    steps: int
    loads: int
    load_seconds: float = 0.0  # in which no token could be sampled because weights were changed


class AskTurn(Wire, frozen=True):
    """A request of a policy's engine to update its weights now, or (`done`) the report that it has."""

    policy: str
    engine: str
    done: bool = False
    wait: Finite = 0.0


class TurnReply(Wire, frozen=True):
    """Whether the engine may update now. If not, it asks again."""

    granted: bool


class EngineInfo(Wire, frozen=True):
    """A process that samples for others: where it listens and which version of each policy it serves now.

    `paused` says why it does not sample now; it is empty while it samples. `trouble` says what is wrong with its
    weights.
    """

    name: str
    url: str
    versions: dict[str, int]
    context: int
    slots: int
    running: int = 0
    waiting: int = 0
    paused: str = ""
    trouble: str = ""


class LookEngines(Wire, frozen=True):
    """A request for the engine processes of a run. It is answered once an engine's weights, address or state differ
    from those in the answer with the number `news`, or after `wait` seconds."""

    news: int = -1
    wait: Finite = 0.0


class Engines(Wire, frozen=True):
    """The engine processes of a run that reported recently. In an answer to one of them, `ended` says that the run no
    longer needs any. `news` changes whenever an engine's weights, address or state change."""

    engines: list[EngineInfo]
    ended: bool = False
    news: int = 0
