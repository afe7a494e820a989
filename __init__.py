"""eagle3: compile an LLM and its EAGLE-3 draft into engines, and decode losslessly.

engine = eagle3.load("bundle/")
result = engine.generate("Hello", max_new_tokens=64)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.runtime.acceptance.rules import TokenLogprob
    from eagle3.runtime.engine import Chunk, Engine, Result, load
    from eagle3.runtime.errors import (
        BuildError,
        BundleError,
        CheckpointError,
        DataError,
        DeviceError,
        Eagle3Error,
        EngineError,
        EngineMissing,
        ExportError,
        PlanError,
        PromptTooLong,
        RequestError,
        SelfCheckFailed,
        TrainingError,
        UnsupportedModel,
    )
    from eagle3.runtime.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "BuildError",
    "BundleError",
    "CheckpointError",
    "Chunk",
    "DataError",
    "DeviceError",
    "Eagle3Error",
    "Engine",
    "EngineError",
    "EngineMissing",
    "ExportError",
    "PlanError",
    "PromptTooLong",
    "RequestError",
    "Result",
    "SelfCheckFailed",
    "Stats",
    "TokenLogprob",
    "TrainingError",
    "UnsupportedModel",
    "load",
]

_HOMES = {
    "Chunk": "engine",
    "Engine": "engine",
    "Result": "engine",
    "load": "engine",
    "TokenLogprob": "acceptance.rules",
    "Stats": "stats",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use, so that `import eagle3` is fast. Errors are in `errors.py`."""
    if name not in __all__:
        raise AttributeError(f"module 'eagle3' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"eagle3.runtime.{_HOMES.get(name, 'errors')}"), name)
