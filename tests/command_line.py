"""The command line as tests call it."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from eagle3 import cli


def call(*words: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words], input=stdin)


def failed(result: Result, code: int, *parts: str) -> None:
    """One line on stderr, no traceback, nothing else printed."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.stderr
    assert all(part in result.stderr for part in parts), result.stderr
