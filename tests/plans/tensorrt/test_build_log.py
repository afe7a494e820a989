"""Tests of the progress line, which only a terminal gets, and of shortened errors."""

from __future__ import annotations

import io
import logging

from eagle3.plans.tensorrt.build_log import BuildProgress, Log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _some(progress: BuildProgress) -> None:
    progress.start("Building engine", 6)
    progress._shown = 0.0
    progress.start("Optimizing graph", 30)
    progress._shown = 0.0
    progress.step("Optimizing graph", 4)
    progress.finish("Optimizing graph")
    progress._shown = 0.0
    progress.step("Building engine", 2)
    progress.clear()


def test_a_terminal_gets_one_line_that_goes_away() -> None:
    stream = Terminal()
    _some(BuildProgress("target", stream))
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        "target: building engine, 0/6",
        "target: optimizing graph, 0/30",
        "target: optimizing graph, 5/30",
        "target: building engine, 3/6",
        "",
    ]


def test_anything_else_gets_nothing() -> None:
    stream = io.StringIO()
    _some(BuildProgress("target", stream))
    assert stream.getvalue() == ""


def test_errors_are_few_and_short() -> None:
    log = Log()
    texts = ["[E] first\n  of two lines", "[E] first of two lines", "x" * 400, "third", "fourth"]
    for level, text in [(logging.WARNING, "a warning"), *((logging.ERROR, t) for t in texts)]:
        log.emit(logging.LogRecord("", level, "", 0, text, None, None))
    assert log.errors() == f"first of two lines; {'x' * 300}...; third"
    assert log.says("fourth") and not log.says("warning")
    assert Log().errors() == "no error was reported"
