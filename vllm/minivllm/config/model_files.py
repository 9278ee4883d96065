"""Find the files of a model: in a local directory, or on the Hugging Face Hub."""

import json
from pathlib import Path
from typing import Any

from minivllm.config.checks import is_count, require
from minivllm.errors import MinivllmError

HUB_SECONDS = 10


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        MinivllmError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MinivllmError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise MinivllmError(f"{path} holds {type(contents).__name__}, not a mapping of names to values")
    return contents


def checkpoint_bytes(directory: Path) -> int | None:
    """Return the total size of the tensors in a directory's safetensors files in bytes, or None
    without such files.
    """
    # Large checkpoints have several files, and their index knows the total.
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        metadata = read_json_object(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return total if is_count(total, 1) else None
    if not (file := directory / "model.safetensors").is_file():
        return None
    with file.open("rb") as stream:  # eight bytes give the length of the header before the tensors
        return max(0, file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little"))


def config_path(path_or_name: str | Path) -> Path:
    """Return the path of a local model directory's `config.json` (or of that file itself), else the
    one of a model on the Hub.

    Raises:
        MinivllmError: there is no such local file, and no model of that name can be fetched.
    """
    name, path = str(path_or_name), local_path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise MinivllmError(f"{path} has no config.json; a model directory has one beside its weights")
        return path / "config.json"
    # Names on the Hub are "owner/model", so this can only be a path.
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise MinivllmError(f"there is no model directory {name!r}")
    return hub_file(name, "config.json")


def local_path(path_or_name: str | Path) -> Path:
    """Return the local path for this name; it need not exist.

    Raises:
        MinivllmError: the name is not a valid path.
    """
    name = str(path_or_name)
    try:
        path = Path(name).expanduser()
        # Only to find out whether the system accepts such a path.
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        # A name that is too long for a path would fill the screen.
        raise MinivllmError(f"there is no model directory {name[:60]!r}: {reason}") from None
    require(name and "\0" not in name, f"there is no model directory {name!r}")
    return path


def optional_file(path_or_name: str | Path, filename: str) -> Path | None:
    """Return a file of a local model directory, or of a model on the Hub; None if there is none."""
    directory = local_path(path_or_name)
    try:
        path = directory / filename if directory.is_dir() else hub_file(str(path_or_name), filename)
    except MinivllmError:
        return None
    return path if path.is_file() else None


def hub_file(name: str, filename: str) -> Path:
    """Return a file of a model on the Hugging Face Hub, from the local cache or downloaded.

    Raises:
        MinivllmError: the Hub does not have the model or the file, or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, filename)
        # `try_to_load_from_cache` returns a marker if the file is known not to exist.
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(name, filename), timeout=HUB_SECONDS)  # fails at once; a download would retry
        return Path(hf_hub_download(name, filename))
    except Exception as error:  # the Hub client raises errors of several libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MinivllmError(
            f"{name!r} is not a local directory, and {filename} cannot be fetched from the Hugging Face hub "
            f"({reason}); give a local model directory, or check the name and the network"
        ) from error
