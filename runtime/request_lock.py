"""The lock that lets an engine run one request at a time."""

from __future__ import annotations

import threading

from eagle3.runtime.errors import RequestError


class RequestLock:
    """Context manager around a request. It waits for other threads and refuses its own.

    A stream that several threads read belongs to the thread that read it last. Entering raises
    RequestError if this thread already holds an open stream, which would otherwise deadlock.
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
        """Make the current thread the owner of the request."""
        self._owner = threading.current_thread()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()
