"""Conversations and kept trajectories as lines for a terminal: messages, tables, one episode, and its tokens.

`rillflow.storage.trajectories` stores and reads them. Texts of tokens are for people to read: they are never tokenised
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from rich.table import Table
from rich.text import Text

from rillflow.errors import DataError
from rillflow.storage.trajectory_format import TokenPath, Trajectory, TrajectoryInfo, conversation
from rillflow.weights.model_folder import model_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WIDTH = 11  # columns of who speaks
_SHOWN = 400  # characters of a payload or an answer
_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def spoken(message: Mapping[str, Any], who: str = "", note: str = "") -> Text:
    """Return a message with its tool calls; `who` is the speaker where the role says too little, `note` stands behind
    it."""
    role = str(message.get("role", ""))
    style = _STYLES.get(role, "")
    parts: list[Text] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(Text(str(reasoning).strip(), "dim italic"))
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        parts.append(Text(content.rstrip()))
    elif content and not isinstance(content, str):
        parts.append(Text(json.dumps(content, ensure_ascii=False)))
    parts += [Text(called(call), "bold") for call in message.get("tool_calls") or ()]
    said = Text("\n").join(parts or [Text("(nothing)", "dim")])
    if note:
        said.append(f"  {note}", "dim")
    return labelled(who or role, said, style)


def called(call: Mapping[str, Any]) -> str:
    """Return a tool call as `name(argument=value, …)`; arguments that are not an object stay as written."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{function.get('name')}({arguments})"
    if not isinstance(arguments, Mapping):
        return f"{function.get('name')}({'' if arguments is None else arguments})"
    shown = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    return f"{function.get('name')}({shown})"


def labelled(label: str, said: Text | str, style: str = "") -> Text:
    """Return text with a label in front of its first line; the others are indented as far."""
    text = said if isinstance(said, Text) else Text(said)
    lines = text.split("\n", allow_blank=True)
    indented = Text("\n" + " " * _WIDTH).join(lines)
    return Text.assemble((f"{label:<{_WIDTH - 1}.{_WIDTH - 1}} ", style), indented)


def shortened(value: Any) -> str:
    """Return a payload or an answer as text, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def several(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def sampled_tokens(texts: Sequence[str], logprobs: Sequence[float]) -> Text:
    """Return tokens with their log-probs, those that were unlikely in red."""
    line = Text()
    for text, logprob in zip(texts, logprobs, strict=True):
        line.append(json.dumps(text, ensure_ascii=False)[1:-1] or "·", "red" if logprob < -2.3 else "green")
        line.append(f" {logprob:.2f}  ", "dim")
    return line


_FILE = "tokenizer.json"


def token_texts(run: str | Path, policy: str, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to those before it. A token that ends inside a character adds nothing, and
    the one that completes it adds the whole character. DataError where the tokenizer is not on this machine."""
    from tokenizers.decoders import DecodeStream

    tokenizer, stream = _tokenizer(_model(Path(run), policy)), DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def _model(run: Path, policy: str) -> str:
    try:
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        return str(recipe["policies"][policy]["model"])
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"{run} has no policy {policy!r:.80}", "its recipe.yaml names the policies") from error


@lru_cache(8)
def _tokenizer(model: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = model_folder(model) / _FILE
    if not path.is_file():
        raise DataError(f"the tokenizer of {model} is not on this machine", f"{path} does not exist")
    return Tokenizer.from_file(str(path))


Colouring = Literal["mask", "version", "advantage", "logprob", "gap"]
Texts = Callable[[str, Sequence[int]], Sequence[str]]  # what the tokens of a policy say

_VERSIONS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_UNLIKELY, _APART = -2.3, 0.05  # a log-prob below, a distance above: in red
_MASKED = "dim"


def table(infos: Sequence[TrajectoryInfo]) -> Table:
    """Return one line for each trajectory. In 80 columns only the last column is cut."""
    made = Table(box=None, pad_edge=False)
    for name in ("episode", "kept"):
        made.add_column(name, no_wrap=True)
    for name in ("step", "reward", "adv.", "tokens", "calls", "forks", "version"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("prompt", max_width=40)  # the only one that rich may make narrower
    for info in infos:
        said, style = (info.cause, "red") if info.status == "failed" else (info.prompt, "dim")
        about = Text(said, style, no_wrap=True, overflow="ellipsis")
        made.add_row(
            Text(info.id, "bold"),
            "eval" if info.kept == "evaluation" else info.kept,
            _number(info.step, "d"),
            Text(_number(info.reward, ".3g"), _sign(info.reward)),
            _number(info.advantage, "+.2f"),
            f"{info.tokens}{'✂' if info.truncated else ''}",
            str(info.calls),
            str(info.forks or ""),
            _versions(info),
            about,
        )
    return made


def episode(
    found: Trajectory, *, path: int | None = None, colouring: Colouring | None = None, texts: Texts | None = None
) -> Iterator[Text]:
    """Yield a trajectory line by line: its prompt, the messages of each path (or of one), and its reward; with
    `colouring` also its tokens."""
    info = found.info
    head = (
        f"{info.lane}, {info.kept}{'' if info.step is None else f', step {info.step}'}; prompt {info.prompt}, "
        f"version {_versions(info) or '-'}, {several(info.calls, 'call')}, {info.seconds:.2f} s on {info.node or '-'}"
    )
    yield Text.assemble((info.id, "bold"), f"  {head}")
    yield labelled("payload", shortened(found.payload), "dim")
    numbers = range(len(found.paths)) if path is None else [range(len(found.paths))[path]]
    for number in numbers:
        yield from _path(found, number, whole=path is not None)
        if colouring is not None:
            for sample in found.samples:
                if sample.path == number:
                    yield labelled("tokens", tokens(sample, colouring, texts), "dim")
    if colouring is not None:
        for sample in found.samples:
            if sample.path is None:
                yield labelled("tokens", tokens(sample, colouring, texts), "dim")
        yield labelled("", Text(_LEGENDS[colouring], "dim"))
    yield from _worth(found)


def _path(found: Trajectory, number: int, *, whole: bool) -> Iterator[Text]:
    """Yield a path; only what it adds to an earlier one, where that is shown before."""
    entry = found.paths[number]
    shared = 0 if whole else int(entry.get("shared") or 0)
    if len(found.paths) > 1:
        yield Text(f"── {_told(found, number)}", "magenta")
    given = {item["message"]: item["reward"] for item in entry.get("rewards", ())}
    seams = {item["message"]: f"cut and continued ({item['cause']})" for item in entry.get("seams", ())}
    messages = conversation(found.paths, number)[shared:]
    first = len(messages) - len(entry["messages"])  # notes count from the path's own first message
    for place, message in enumerate(messages, start=-first):
        notes = [seams[place]] if place in seams else []
        notes += [f"reward {given[place]:g}"] if place in given else []
        if place == len(entry["messages"]) - 1 and entry.get("finish") == "length":
            notes.append("cut by its length")
        yield spoken(message, str(entry.get("agent", "")) if message.get("role") == "assistant" else "", _note(notes))


def _told(found: Trajectory, number: int) -> str:
    """Say what a path is: whose, from where, and the sizes of its sample."""
    entry = found.paths[number]
    parts = [f"path {number} of {entry['policy']}"]
    if entry.get("follows") is not None:
        same = [n for n, other in enumerate(found.paths) if other["policy"] == entry["policy"]]
        why = f" ({entry['fork']})" if entry.get("fork") else ""
        parts.append(f"leaves path {same[entry['follows']]} after {several(entry['shared'], 'message')}{why}")
    for sample in found.samples:
        if sample.path == number:
            trained = int(sample.mask.sum())
            parts.append(f"{len(sample.tokens)} tokens, {trained} trained, reward {sample.reward:g}")
    return ", ".join(parts)


def _worth(found: Trajectory) -> Iterator[Text]:
    info = found.info
    if info.status == "failed":
        yield Text.assemble((f"failed: {info.cause}", "bold red"))
        yield Text(found.error)
        return
    yield labelled("reward", Text("-" if info.reward is None else f"{info.reward:g}", "bold"), "bold")
    for name, value in found.rewards.items():
        yield labelled("", f"{name} {value:g}")
    parts = [f"{info.tokens} tokens, {info.trained} of them trained", several(info.samples, "sample")]
    parts += [several(info.forks, "fork")] if info.forks else []
    parts += [f"advantage {info.advantage:+.3f}"] if info.advantage is not None else []
    parts += [f"engine and trainer {info.gap:.4f} apart"] if info.gap is not None else []
    yield labelled("", Text(", ".join(parts), "dim"))


# ------------------------------------------------------------ tokens

_LEGENDS: dict[Colouring, str] = {
    "mask": "bold: trained; dim: given, not trained",
    "version": "one colour for each version that sampled; dim: not trained",
    "advantage": "green: above 0; red: below 0; dim: not trained, or not reported by the trainer",
    "logprob": f"red: log-prob below {_UNLIKELY}; dim: not trained",
    "gap": f"red: engine and trainer more than {_APART} apart; dim: not trained, or not reported by the trainer",
}


def tokens(sample: TokenPath, colouring: Colouring, texts: Texts | None = None) -> Text:
    """Return the tokens of a sample, each in the colour of what `colouring` asks for; ids where texts are unknown."""
    ids = sample.tokens.tolist()
    said = [f"{number} " for number in ids] if texts is None else texts(sample.policy, ids)
    styles = _styles(sample, colouring)
    line = Text()
    for text, style, trained in zip(said, styles, sample.mask.tolist(), strict=True):
        line.append(text, style if trained else _MASKED)
    return line


def _styles(sample: TokenPath, colouring: Colouring) -> list[str]:
    """Return the style of each token, as if all were trained."""
    match colouring:
        case "mask":
            return ["bold"] * len(sample.tokens)
        case "version":
            return [_VERSIONS[version % len(_VERSIONS)] for version in sample.versions.tolist()]
        case "advantage":
            values = sample.advantages if sample.advantages is not None else np.full(len(sample.tokens), np.nan)
            return [_sign(value) if np.isfinite(value) else _MASKED for value in values.tolist()]
        case "logprob":
            return ["red" if value < _UNLIKELY else "green" for value in sample.logprobs.tolist()]
        case "gap":
            if sample.trainer_logprobs is None:
                return [_MASKED] * len(sample.tokens)
            apart = np.abs(sample.trainer_logprobs - sample.logprobs).tolist()
            return [_MASKED if np.isnan(value) else "red" if value > _APART else "green" for value in apart]


# ------------------------------------------------------------ JSON


def as_json(found: Trajectory) -> dict[str, Any]:
    """Return a whole trajectory as JSON values; NaN becomes null."""
    return {
        "info": {name: getattr(found.info, name) for name in found.info.__struct_fields__},
        "payload": found.payload,
        "paths": list(found.paths),
        "rewards": dict(found.rewards),
        "error": found.error,
        "samples": [_sample(sample) for sample in found.samples],
    }


def _sample(sample: TokenPath) -> dict[str, Any]:
    names = ("policy", "role", "reward", "fork", "truncated", "path")
    arrays = ("tokens", "mask", "logprobs", "versions", "advantages", "trainer_logprobs")
    columns = {name: _numbers(getattr(sample, name)) for name in arrays}
    return {name: getattr(sample, name) for name in names} | columns


def _numbers(array: Any) -> list[float | int | None] | None:
    if array is None:
        return None
    return [None if value != value else value for value in array.tolist()]  # noqa: PLR0124 - NaN is not itself


# ------------------------------------------------------------ words


def _versions(info: TrajectoryInfo) -> str:
    if info.oldest is None:
        return ""
    return str(info.newest) if info.oldest == info.newest else f"{info.oldest}-{info.newest}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _sign(value: float | None) -> str:
    return "" if not value else "green" if value > 0 else "red"


def _note(notes: Sequence[str]) -> str:
    return f"[{', '.join(notes)}]" if notes else ""
