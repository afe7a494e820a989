"""Stop strings: found in the generated text, and never shown, not even in part."""

from collections.abc import Sequence

from eagle3.runtime.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 512


class StopStrings:
    """Holds back text that may start a stop string, and stops at the first complete one.

    The result does not depend on how the text is divided into pushes: the stop string that
    completes first wins, and of two that end at the same position the longer one. Raises
    RequestError for more than MAX_STOPS stop strings, and for one that is empty, not a string, or
    longer than MAX_STOP_CHARS.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = _checked_stops(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found. Nothing is emitted after that."""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be shown, and whether a stop string ended it."""
        if self.stopped:
            return "", True
        text = self._held + text
        start = self._first_match(text)
        self.stopped = start is not None
        end = len(text) - self._num_open(text) if start is None else start
        self._held = "" if self.stopped else text[end:]
        return text[:end], self.stopped

    def flush(self) -> str:
        """End the text and return what was held back, since it starts no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Return the start of the match that completes first."""
        found = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + size, start) for start, size in found if start >= 0]
        return min(matches)[1] if matches else None

    def _num_open(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stops, str | bytes) or not isinstance(stops, Sequence):
        raise RequestError(f"stop must be a list of strings, got {stops!r:.80}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop must have at most {MAX_STOPS} strings, got {len(stops)}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(f"stop[{i}] must be a string, got {stop!r:.80}")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop[{i}] must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}"
            )
    return tuple(stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start
