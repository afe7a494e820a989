"""What TensorRT and polygraphy say while they work: kept for error messages, shown as progress.

polygraphy prints to stdout, where results belong; here its log goes into a list. On a terminal, a
line on stderr tells how far a build is.
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
    """Keeps the messages of one build."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelno, record.getMessage()))

    def says(self, text: str) -> bool:
        """Whether an error contains `text`."""
        return any(text in message for level, message in self.messages if level >= logging.ERROR)

    def errors(self) -> str:
        """The first errors, each once and not endless."""
        errors = [_condensed(text) for level, text in self.messages if level >= logging.ERROR]
        return "; ".join(list(dict.fromkeys(errors))[:_SHOWN_ERRORS]) or "it gave no reason"


def _condensed(message: str) -> str:
    """One line, less the marks of severity."""
    text = " ".join(message.split()).removeprefix("[E] ").removeprefix("[!] ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@contextmanager
def captured(polygraphy: Any) -> Iterator[Log]:
    """polygraphy's and TensorRT's messages go into the log inside this context.

    polygraphy calls what TensorRT-RTX deprecates, timing caches; that is not the user's to read.
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
    """How far a build is; the line is written only where `stream` is a terminal."""

    title: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    interrupted: bool = False
    _phases: list[_Phase] = field(default_factory=list)
    _shown: float = 0.0
    _wrote: bool = False

    def start(self, name: str, steps: int) -> None:
        self._phases.append(_Phase(name, steps))
        self.show()

    def step(self, name: str, index: int) -> None:
        for phase in self._phases:
            if phase.name == name:
                phase.done = index + 1
        self.show()

    def finish(self, name: str) -> None:
        self._phases = [phase for phase in self._phases if phase.name != name]

    def show(self) -> None:
        """Writes the line, at most ten times a second."""
        now = time.monotonic()
        if not self._phases or now - self._shown < _SHOWN_EVERY_S or not self.stream.isatty():
            return
        last = self._phases[-1]
        self._shown, self._wrote = now, True
        self.stream.write(f"\r\x1b[K{self.title}: {last.name.lower()}, {last.done}/{last.steps}")
        self.stream.flush()

    def clear(self) -> None:
        """Takes the line away."""
        if self._wrote:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def progress_monitor(tensorrt: Any, progress: BuildProgress) -> Any:
    """TensorRT's IProgressMonitor that tells `progress`, and ends a build that was interrupted."""

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
    """Ctrl-C inside this context is noted, and raised when the context ends.

    An exception may not leave a callback of C++. Outside the main thread nothing is changed: there
    Python has no signals.
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
