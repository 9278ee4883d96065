"""The names that requests may use: the model's own, and those of adapters; and the folders from
which clients may load adapters.

In vLLM v0.33.0: `vllm/entrypoints/openai/models/serving.py` (`OpenAIServingModels`),
`vllm/entrypoints/serve/lora/`, `LoRAParserAction` in `vllm/entrypoints/common/cli_args.py`. vLLM
loads from any path, or from the Hub, once `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set; here the
folders must be named.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.config.checks import encodable, require
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.errors import MinivllmError
from minivllm.lora.peft_helper import CONFIG_FILE, WEIGHTS_FILE

MAX_NAME_CHARACTERS = 256


class OpenAIServingModels:
    """One model, under one or more names, and its adapters, each under one name."""

    def __init__(self, engine: AsyncLLM, settings: FrontendArgs) -> None:
        self._engine, self._settings = engine, settings
        self._root = str(engine.engine_args.model)
        self.names = settings.served_model_name or [self._root]
        self._created = int(time.time())
        self._adapters: dict[str, LoRARequest] = {}
        self._ids = itertools.count(1)
        # Loading takes seconds, and two clients may load the same name meanwhile.
        self._changing = asyncio.Lock()

    def check(self, name: str | None) -> LoRARequest | None:
        """Return the adapter that a request names; None for the model itself, whose name may be
        omitted.

        Raises:
            RequestError: it names something else.
        """
        if not name or name in self.names:
            return None
        if name in self._adapters:
            return self._adapters[name]
        message = f"The model `{name[:200]}` does not exist. Valid aliases: {', '.join(self.names)}."
        raise RequestError(message, 404, parameter="model")

    def name_in_reply(self, name: str | None) -> str:
        """Return the model name for the reply to a request that `check` has accepted."""
        return self.names[0] if not name or name in self.names else name

    async def show_available_models(self) -> dict[str, Any]:
        """Return the list of models: the model's names first, then the adapters."""
        longest = self._engine.input_processor.limits.max_model_len
        cards = [(name, self._root, None, longest) for name in self.names]
        cards += [(name, adapter.lora_path, self.names[0], None) for name, adapter in self._adapters.items()]
        fields = ("id", "root", "parent", "max_model_len")
        shared = {"object": "model", "created": self._created, "owned_by": "vllm"}
        return {"object": "list", "data": [shared | dict(zip(fields, card, strict=True)) for card in cards]}

    async def init_static_loras(self) -> None:
        """Load the adapters that the server starts with.

        Raises:
            MinivllmError: one of them cannot be served.
        """
        for name, path in lora_modules_of(self._settings.lora_modules).items():
            self._check_free(name)
            await self._add(LoRARequest(name, next(self._ids), path))

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> str:
        """Load an adapter, replacing one of the same name if `load_inplace` is set; return the
        message for the client.

        Requests in progress keep the adapter that they began with.

        Raises:
            RequestError: there is no adapter there that may be loaded, it cannot be served, or the
                name is taken.
        """
        name = request.lora_name
        try:
            require(name and request.lora_path, "lora_name and lora_path must both be given")
            async with self._changing:
                before = self._adapters.get(name)
                # Also one that replaces another has an id of its own: requests in progress keep
                # the other.
                await self._add(LoRARequest(name, next(self._ids), self._folder_of(request)))
        except RequestError:
            raise
        except MinivllmError as error:
            raise RequestError(str(error), 400, "InvalidUserInput") from None
        # Only now: until the new one is loaded, requests must still find the old one.
        if before is not None:
            await self._engine.remove_lora(before.lora_int_id)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload_lora_adapter(self, request: UnloadLoRAAdapterRequest) -> str:
        """Remove an adapter; requests in progress keep it until they end. Return the message for
        the client.

        Raises:
            RequestError: no adapter has that name.
        """
        name = request.lora_name
        if not name:
            raise RequestError("lora_name must be given", 400, "InvalidUserInput")
        async with self._changing:
            adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise RequestError(f"The lora adapter '{name[:200]}' cannot be found.", 404)
        # In the cores it stays until its last request has ended.
        await self._engine.remove_lora(adapter.lora_int_id)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _folder_of(self, request: LoadLoRAAdapterRequest) -> str:
        """Return the adapter's folder, if a client may load it under this name."""
        check_name(request.lora_name)
        self._check_free(request.lora_name, request.load_inplace)
        folder = adapter_folder(request.lora_path, self._settings.runtime_lora_path)
        if folder is None:
            shown = request.lora_path[:200].encode("utf8", "backslashreplace").decode()
            raise RequestError(f"Loading lora {request.lora_name} failed: No adapter found for {shown}", 404)
        return folder

    async def _add(self, adapter: LoRARequest) -> None:
        try:
            await self._engine.add_lora(adapter)
        except BaseException:
            # Some cores may have it, and no request can find it.
            await self._engine.remove_lora(adapter.lora_int_id)
            raise
        self._adapters[adapter.lora_name] = adapter

    def _check_free(self, name: str, load_inplace: bool = False) -> None:
        require(name not in self.names, f"{name!r} is the name of the model itself; give the adapter another one")
        is_free = name not in self._adapters or load_inplace
        require(is_free, f"the adapter {name!r} is already loaded; set load_inplace to replace it")


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
    is_name = 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and name.strip()
    require(is_name, f"the adapter's name {name[:60]!r} must be 1 to {MAX_NAME_CHARACTERS} printable characters")


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
