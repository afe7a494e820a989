"""One request of an engine at a time: whose turn it is, and who waits."""

from __future__ import annotations

import threading

from eagle3.runtime.errors import RequestError


class RequestLock:
    """A context that a request is run in: waits for other threads, refuses its own.

    A stream that is read by several threads belongs to the one that read it last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None

    def __enter__(self) -> RequestLock:
        if self._owner is threading.current_thread():
            raise RequestError(
                "a stream of this engine is still open in this thread; read it to its end or "
                "close() it before the next request"
            )
        self._lock.acquire()
        self.resume()
        return self

    def resume(self) -> None:
        """The current thread goes on with the request."""
        self._owner = threading.current_thread()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()
