"""Stop strings: where an agent wants its answer cut, in text that comes in pieces."""

from __future__ import annotations


class StopStrings:
    """Cuts text at the first of the agent's stop strings; `hit` names it once it was found."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = ""

    def feed(self, text: str) -> str:
        if self.hit:
            return ""
        text = self._held + text
        # The one that ends first, as if the text had come character by character; of those the longest.
        found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start]
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `markers`."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
