"""Text to token ids and back, using the model's `tokenizer.json`."""

from pathlib import Path

from tokenizers import Tokenizer

from minivllm.config.model import hub_file, local_path
from minivllm.errors import MinivllmError

FILENAME = "tokenizer.json"


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """The tokenizer of a local model directory, or of a model on the Hugging Face hub.

    `tokenizer.encode(text).ids` and `tokenizer.decode(ids)` are its two directions.

    Raises:
        MinivllmError: there is no `tokenizer.json`, or it cannot be read.
    """
    directory = local_path(path_or_name)
    path = directory / FILENAME if directory.is_dir() else hub_file(str(path_or_name), FILENAME)
    if not path.is_file():
        raise MinivllmError(f"{directory} has no {FILENAME}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise MinivllmError(f"{path} cannot be read as a tokenizer: {error}") from error
