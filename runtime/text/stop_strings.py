"""The strings that end a request: found in the text, and never shown in part."""

from collections.abc import Sequence

from eagle3.runtime.errors import RequestError

MAX_STOPS = 16
MAX_STOP_CHARS = 512


class StopStrings:
    """Holds back text that may be the start of a stop string, and ends at the first one whole.

    The result does not depend on how the text is cut into pushes: the stop string that is complete
    first wins, and of two that end together the longer. Raises RequestError for stop strings that
    are empty, not text, longer than MAX_STOP_CHARS or more than MAX_STOPS.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = _checked_stops(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string was met; from then on nothing is emitted."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now certain to be shown, and whether a stop string ended it."""
        if self.stopped:
            return "", True
        text = self._held + text
        start = self._first_match(text)
        self.stopped = start is not None
        end = len(text) - self._num_open(text) if start is None else start
        self._held = "" if self.stopped else text[end:]
        return text[:end], self.stopped

    def flush(self) -> str:
        """The end of the text: what was held started no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the match that is complete first starts."""
        found = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + size, start) for start, size in found if start >= 0]
        return min(matches)[1] if matches else None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of `text` that is a start of a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stops, str | bytes) or not isinstance(stops, Sequence):
        raise RequestError(f"stop is {stops!r:.80}: give a list of texts")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings: give at most {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(f"stop[{i}] is {stop!r:.80}: give a text")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(f"stop[{i}] has {len(stop)} characters: give 1 to {MAX_STOP_CHARS}")
    return tuple(stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper start of `stop` that `text` ends with."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start
