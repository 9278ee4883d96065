"""Determine which adapters a server starts with, and which folders a client may load others from.

In vLLM v0.33.0: `LoRAParserAction` in `vllm/entrypoints/common/cli_args.py`. vLLM loads from any
path, or from the Hub, once `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set; here the folders must be
named.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from minivllm.config.checks import encodable, require
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.lora.peft_helper import CONFIG_FILE, WEIGHTS_FILE

MAX_NAME_CHARACTERS = 256


def lora_modules_of(values: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--lora-modules`, each `name=path`; return the paths by name.

    Raises:
        MinivllmError: a value has another form, or two have the same name.
    """
    modules: dict[str, str] = {}
    for text in values:
        name, _, path = text.partition("=")
        require(bool(name and path), f"lora_modules has {text[:100]!r}; an adapter must be name=path")
        check_name(name)
        require(name not in modules, f"lora_modules has two adapters named {name!r}; give each a name of its own")
        modules[name] = path
    return modules


def check_name(name: str) -> None:
    """Refuse an adapter's name that cannot be shown in a list of models, a label and a log line.

    Raises:
        MinivllmError: it is empty, too long, or has characters that cannot be printed.
    """
    encodable(name, "lora_name")
    require(
        0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and bool(name.strip()),
        f"the adapter's name {name[:60]!r} must be 1 to {MAX_NAME_CHARACTERS} printable characters",
    )


def check_lora_settings(args: EngineArgs, settings: FrontendArgs) -> None:
    """Refuse adapter flags that cannot be honoured.

    Raises:
        MinivllmError: the flags cannot be honoured; one line says why.
    """
    lora_modules_of(settings.lora_modules)
    for name in ("lora_modules", "runtime_lora_path"):
        unused = not getattr(settings, name)
        require(args.enable_lora or unused, f"{name} needs an engine with adapters: give --enable-lora too")
    for folder in settings.runtime_lora_path:
        require(Path(folder).is_dir(), f"runtime_lora_path is {folder!r}, which is not a folder")


def adapter_folder(path: str, folders: Sequence[str]) -> str | None:
    """Return the real path of an adapter if it is inside one of these folders; else None, whether
    the adapter exists or not.

    Links are followed first, including those of its files, so that none leads out of the folders;
    and the files must be regular files, not pipes.
    """
    try:
        allowed = [Path(os.path.realpath(folder)) for folder in folders]  # one of them may be gone
        # A client may name any path: decide by where it really leads.
        target = Path(os.path.realpath(path, strict=True))
        config = Path(os.path.realpath(target / CONFIG_FILE, strict=True))
        weights = Path(os.path.realpath(target / WEIGHTS_FILE))
    except (OSError, ValueError):  # it is not there, it is too long, it has a NUL, or links go round in circles
        return None
    # Also the files themselves: a link in an allowed folder may lead out of it.
    inside = all(any(part.is_relative_to(folder) for folder in allowed) for part in (target, config, weights))
    return str(target) if inside and config.is_file() and (weights.is_file() or not weights.exists()) else None
