"""Log and progress of a TensorRT build.

polygraphy prints its log to stdout, which is reserved for results. This module collects the log in
a list instead, for error messages. On a terminal, a line on stderr shows the progress of the build.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

_NAME = "Polygraphy"
_SHOWN_EVERY_S = 0.1
_SHOWN_ERRORS = 3
_LONGEST = 300


class Log(logging.Handler):
    """Log handler that collects the warnings and errors of one build."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store level and message of a record."""
        self.messages.append((record.levelno, record.getMessage()))

    def says(self, text: str) -> bool:
        """Return whether an error contains `text`."""
        return any(text in message for level, message in self.messages if level >= logging.ERROR)

    def errors(self) -> str:
        """Return the first errors, without duplicates and shortened, for an error message."""
        errors = [_condensed(text) for level, text in self.messages if level >= logging.ERROR]
        return "; ".join(list(dict.fromkeys(errors))[:_SHOWN_ERRORS]) or "no error was reported"


def _condensed(message: str) -> str:
    """Return a message as one line of limited length, without the severity prefix."""
    text = " ".join(message.split()).removeprefix("[E] ").removeprefix("[!] ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@contextmanager
def captured(polygraphy: Any) -> Iterator[Log]:
    """Redirect the messages of polygraphy and TensorRT to the returned log inside this context.

    DeprecationWarnings are silenced, because polygraphy uses timing caches, which TensorRT-RTX
    deprecates, and the user cannot change that.
    """
    logger, target, log = polygraphy.logger.G_LOGGER, logging.getLogger(_NAME), Log()
    before = (logger.use_python_logging_system, logger.colors, target.propagate)
    logger.use_python_logging_system, logger.colors, target.propagate = True, False, False
    target.addHandler(log)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield log
    finally:
        target.removeHandler(log)
        logger.use_python_logging_system, logger.colors, target.propagate = before


@dataclass
class _Phase:
    name: str
    steps: int
    done: int = 0


@dataclass
class BuildProgress:
    """Progress of a build, written as one line to `stream` if that is a terminal.

    title: prefix of the line. interrupted: set to True to end the build, see `stoppable`.
    """

    title: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    interrupted: bool = False
    _phases: list[_Phase] = field(default_factory=list)
    _shown: float = 0.0
    _wrote: bool = False

    def start(self, name: str, steps: int) -> None:
        """Begin a phase of `steps` steps, possibly nested in another phase."""
        self._phases.append(_Phase(name, steps))
        self.show()

    def step(self, name: str, index: int) -> None:
        """Record that step `index`, counted from 0, of a phase is complete."""
        for phase in self._phases:
            if phase.name == name:
                phase.done = index + 1
        self.show()

    def finish(self, name: str) -> None:
        """End a phase."""
        self._phases = [phase for phase in self._phases if phase.name != name]

    def show(self) -> None:
        """Write the line, at most ten times per second."""
        now = time.monotonic()
        if not self._phases or now - self._shown < _SHOWN_EVERY_S or not self.stream.isatty():
            return
        last = self._phases[-1]
        self._shown, self._wrote = now, True
        self.stream.write(f"\r\x1b[K{self.title}: {last.name.lower()}, {last.done}/{last.steps}")
        self.stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._wrote:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def progress_monitor(tensorrt: Any, progress: BuildProgress) -> Any:
    """Return a TensorRT IProgressMonitor that updates `progress` and stops an interrupted build."""

    class Monitor(tensorrt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            tensorrt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress.start(name, steps)

        def phase_finish(self, name: str) -> None:
            progress.finish(name)

        def step_complete(self, name: str, index: int) -> bool:
            progress.step(name, index)
            return not progress.interrupted

    return Monitor()


@contextmanager
def stoppable(progress: BuildProgress) -> Iterator[None]:
    """Defer Ctrl-C inside this context: set `progress.interrupted`, and raise at the end.

    The progress monitor is called from C++, and an exception must not propagate through C++ code.
    Outside the main thread this context does nothing, because Python delivers signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        progress.interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if progress.interrupted:
        raise KeyboardInterrupt
