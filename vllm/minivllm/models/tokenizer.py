"""Conversion of text to token ids and back, using the model's `tokenizer.json`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from minivllm.config.model_files import hub_file, local_path
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILENAME = "tokenizer.json"
# Some models have one of these instead, which transformers can convert.
OTHER_FILES = ("tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """Load the tokenizer of a local model directory, or of a model on the Hugging Face hub.

    `tokenizer.encode(text).ids` turns text into ids, `tokenizer.decode(ids)` ids into text.

    Raises:
        MinivllmError: there is no `tokenizer.json`, or it cannot be read.
    """
    directory = local_path(path_or_name)
    path = directory / FILENAME if directory.is_dir() else hub_file(str(path_or_name), FILENAME)
    if not path.is_file():
        others = [name for name in OTHER_FILES if (directory / name).is_file()]
        raise MinivllmError(f"{directory} has no {FILENAME}{_way_out(directory) if others else ''}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise MinivllmError(f"{path} cannot be read as a tokenizer: {error}") from error


def _way_out(directory: Path) -> str:
    """Return advice with the command that makes a `tokenizer.json` from a tokenizer's other files."""
    path = str(directory)
    code = f"from transformers import AutoTokenizer as T; T.from_pretrained({path!r}).save_pretrained({path!r})"
    return f", only a tokenizer in another form. Convert it once: {shlex.join([sys.executable, '-c', code])}"


def load_transformers_tokenizer(path_or_name: str | Path) -> PreTrainedTokenizerBase:
    """Load the same tokenizer as a transformers object, with its special tokens and chat template.

    Raises:
        MinivllmError: transformers cannot load it.
    """
    from transformers import AutoTokenizer  # takes a second, and the engine itself does not need it

    directory = local_path(path_or_name)
    try:
        return AutoTokenizer.from_pretrained(str(directory if directory.is_dir() else path_or_name))
    except Exception as error:  # files from elsewhere can raise anything
        raise MinivllmError(f"transformers cannot load the tokenizer of {path_or_name}: {error}") from error
