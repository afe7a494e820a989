"""The errors that a caller can catch.

Eagle3Error
├── EngineMissing        no engine package (onnxruntime, tensorrt, ...) is installed
├── DeviceError          no usable GPU: not found, no driver, driver too old, out of memory
├── BundleError          a bundle is missing, truncated, invalid or has another schema version
├── PlanError            a plan contradicts itself or the bundle
├── RequestError         a request cannot be served (invalid prompt or option)
│   └── PromptTooLong    the prompt does not fit the context
├── EngineError          an engine failed or returned NaN
├── BuildError           a plan file cannot be built, or cannot be used on this machine
├── DataError            training data cannot be read, written or used
├── TrainingError        a training run cannot start, resume or continue
└── ExportError          an export failed
    ├── UnsupportedModel     the architecture is not supported; the message names the reason
    ├── CheckpointError      a draft checkpoint cannot be read unambiguously
    └── SelfCheckFailed      the exported engines disagree with PyTorch

Each message states what is wrong, the values involved, and what to do. The command line prints the
message without a traceback and exits with status 1.
"""


class Eagle3Error(Exception):
    """Base class of all errors that a caller can handle."""


class EngineMissing(Eagle3Error):
    """No engine package is installed."""


class DeviceError(Eagle3Error):
    """The GPU cannot be used."""


class BundleError(Eagle3Error):
    """The bundle on disk cannot be used."""


class PlanError(Eagle3Error):
    """A plan contradicts itself, or the bundle or device it is applied to."""


class RequestError(Eagle3Error):
    """A request cannot be served because its prompt or an option is invalid."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context that the bundle was built for."""


class EngineError(Eagle3Error):
    """An engine failed while running."""


class BuildError(Eagle3Error):
    """A TensorRT plan file cannot be built, or cannot be used on this machine."""


class DataError(Eagle3Error):
    """Training data cannot be read, written or used."""


class TrainingError(Eagle3Error):
    """A training run cannot start, resume or continue."""


class ExportError(Eagle3Error):
    """An export failed."""


class UnsupportedModel(ExportError):
    """The target's architecture is not supported; the message names it and the reason."""


class CheckpointError(ExportError):
    """A draft checkpoint cannot be read unambiguously."""


class SelfCheckFailed(ExportError):
    """The exported engines disagree with the PyTorch model beyond the tolerance."""
