"""eagle3: compile an LLM and its EAGLE-3 draft into engines, and decode losslessly.

engine = eagle3.load("bundle/")
result = engine.generate("Hello", max_new_tokens=64)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.runtime.acceptance.rules import TokenLogprob
    from eagle3.runtime.engine import Chunk, Engine, Result, load
    from eagle3.runtime.errors import Eagle3Error
    from eagle3.runtime.stats import Stats

__version__ = "0.1.0"
__all__ = ["Chunk", "Eagle3Error", "Engine", "Result", "Stats", "TokenLogprob", "load"]

_HOMES = {
    "Chunk": "engine",
    "Engine": "engine",
    "Result": "engine",
    "load": "engine",
    "Eagle3Error": "errors",
    "TokenLogprob": "acceptance.rules",
    "Stats": "stats",
}


def __getattr__(name: str) -> Any:
    """Loads a name when it is first used, so that `import eagle3` is instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'eagle3' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"eagle3.runtime.{_HOMES[name]}"), name)
