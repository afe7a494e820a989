"""Every error a caller may catch.

Eagle3Error
├── EngineMissing        no engine package (onnxruntime, tensorrt, ...) is installed
├── DeviceError          no GPU that can be used: none there, no driver, an old one, out of memory
├── BundleError          a bundle is missing, truncated, foreign or of another schema
├── PlanError            a plan that contradicts itself or the bundle
├── RequestError         a request that cannot be served as asked (prompt, sampling option)
│   └── PromptTooLong    the prompt does not fit the context
├── EngineError          an engine failed or returned numbers that are not numbers
├── BuildError           a plan file that cannot be built, or not be used here
├── DataError            training data that cannot be read, written or used
├── TrainingError        a training run that cannot start, resume or go on
└── ExportError          an export cannot be done
    ├── UnsupportedModel     an architecture that cannot be expressed, by name
    ├── CheckpointError      a draft checkpoint that is not understood completely
    └── SelfCheckFailed      the exported engines disagree with PyTorch

Each message says what was wrong, the values involved and what to do. The command line prints
it without a traceback and exits with 1.
"""


class Eagle3Error(Exception):
    """Base of all errors that are the caller's to handle."""


class EngineMissing(Eagle3Error):
    """No engine package is installed."""


class DeviceError(Eagle3Error):
    """The GPU cannot be used as it is."""


class BundleError(Eagle3Error):
    """The bundle on disk cannot be used."""


class PlanError(Eagle3Error):
    """A plan contradicts itself or what it is applied to."""


class RequestError(Eagle3Error):
    """A request cannot be served as asked."""


class PromptTooLong(RequestError):
    """The prompt does not fit the context the bundle was built for."""


class EngineError(Eagle3Error):
    """An engine failed while running."""


class BuildError(Eagle3Error):
    """A TensorRT plan file cannot be built, or cannot be used on this machine."""


class DataError(Eagle3Error):
    """Training data cannot be read, written or used."""


class TrainingError(Eagle3Error):
    """A training run cannot start, resume or go on."""


class ExportError(Eagle3Error):
    """An export cannot be done."""


class UnsupportedModel(ExportError):
    """The target's architecture cannot be expressed; the message names it and the reason."""


class CheckpointError(ExportError):
    """A draft checkpoint is not understood completely."""


class SelfCheckFailed(ExportError):
    """The exported engines disagree with the PyTorch model beyond the tolerance."""
