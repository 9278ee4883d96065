"""Determine which adapters a server starts with, and which folders a client may load others from.

In vLLM v0.33.0: `LoRAModulePath` in `vllm/entrypoints/openai/models/protocol.py`,
`LoRAParserAction` in `vllm/entrypoints/common/cli_args.py`. vLLM loads from any path, or from the
Hub, once `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set; here the folders must be named as well.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minivllm.config.checks import encodable, require
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.lora.peft_helper import CONFIG_FILE, WEIGHTS_FILE

RUNTIME_VARIABLES = ("MINIVLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True)
class LoRAModulePath:
    """An adapter that a server has from the start. `base_model_name` is shown as its parent in the
    list of models.
    """

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules_of(given: Sequence[str]) -> list[LoRAModulePath]:
    """Parse the values of `--lora-modules`: each is `name=path`, or {"name": …, "path": …,
    "base_model_name": …} in JSON.

    Raises:
        MinivllmError: a value has another form, or two have the same name.
    """
    modules = [_module_of(text) for text in given]
    names = [module.name for module in modules]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"lora_modules has two adapters named {twice!r}; give each a name of its own")
    return modules


def _module_of(text: str) -> LoRAModulePath:
    wrong = f'lora_modules has {text[:100]!r}; an adapter must be name=path, or {{"name": …, "path": …}} in JSON'
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        require(bool(name and equals and path), wrong)
        return LoRAModulePath(check_name(name), path)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = {}
    known = {"name", "path", "base_model_name"}
    # Comparisons of key views are comparisons of sets: required, then allowed.
    fits = {"name", "path"} <= fields.keys() <= known and all(isinstance(value, str) for value in fields.values())
    require(fits and bool(fields["path"]), wrong)
    check_name(fields["name"])
    return LoRAModulePath(**fields)


def check_name(name: str) -> str:
    """Return an adapter's name if it can be shown in a list of models, a label and a log line.

    Raises:
        MinivllmError: they cannot.
    """
    encodable(name, "lora_name")
    require(
        0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and bool(name.strip()),
        f"the adapter's name {name[:60]!r} must be 1 to {MAX_NAME_CHARACTERS} printable characters",
    )
    return name


def check_lora_settings(args: EngineArgs, settings: FrontendArgs, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse adapter flags that cannot be honoured.

    Raises:
        MinivllmError: the flags cannot be honoured; one line says why.
    """
    modules, folders = lora_modules_of(settings.lora_modules), settings.runtime_lora_path
    for name, value in (("lora_modules", modules), ("runtime_lora_path", folders)):
        require(args.enable_lora or not value, f"{name} needs an engine with adapters: give --enable-lora too")
    # Who comes from vLLM sets the variable and would wonder why there is no route.
    asked = next((name for name in RUNTIME_VARIABLES if environment.get(name, "0") not in ("", "0")), None)
    require(
        asked is None or bool(folders),
        f"{asked} is set, but no folder to load adapters from: give --runtime-lora-path FOLDER",
    )
    missing = next((folder for folder in folders if not Path(folder).is_dir()), None)
    require(missing is None, f"runtime_lora_path is {missing!r}, which is not a folder")


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
