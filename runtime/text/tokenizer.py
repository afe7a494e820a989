"""The tokenizer of a bundle or a checkpoint."""

import os
from pathlib import Path

from tokenizers import Tokenizer

from eagle3.runtime.bundle.folder import Bundle
from eagle3.runtime.errors import BundleError

TOKENIZER_NAME = "tokenizer.json"


def load_tokenizer(source: Bundle | str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a bundle, a `tokenizer.json` file, or a folder with one.

    Truncation and padding that the file asks for are turned off: a prompt is used whole or
    refused. Raises BundleError for a file that is missing or broken.
    """
    path = _tokenizer_path(source)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BundleError(
            f"{path} is not a valid tokenizer: {error}; export the bundle again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_path(source: Bundle | str | os.PathLike[str]) -> Path:
    if isinstance(source, Bundle):
        return source.path(source.manifest.tokenizer.file)
    path = Path(source)
    return path / TOKENIZER_NAME if path.is_dir() else path
