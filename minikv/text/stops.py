"""Find stop strings in text that arrives in pieces, without letting a part of one out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    The stop that counts is the one that *completes* first; of several that end at the same
    character it is the longest. This depends on the text alone, so the emitted text is the same
    however the text was cut into pieces, and streaming equals not streaming.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "SamplingParams refuses an empty stop string"
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._hit = False

    def add(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return the text that may be emitted now and whether a stop was hit.

        Text that may yet turn out to begin a stop is held back. After a hit nothing more comes.
        """
        if self._hit:
            return "", True
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._hit, self._held = True, ""
            return text[: min(matches)[1]], True
        keep = len(text) - self._held_length(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The held-back text, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
