"""The names that requests may use: the model's own, and those of adapters.

In vLLM v0.33.0: `vllm/entrypoints/openai/models/serving.py` (`OpenAIServingModels`),
`vllm/entrypoints/serve/lora/`.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from minivllm.config.checks import require
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.errors import RequestError, not_found
from minivllm.entrypoints.openai.lora_modules import adapter_folder, check_name
from minivllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from minivllm.errors import MinivllmError


class OpenAIServingModels:
    """One model, under one or more names, and its adapters, each under one name."""

    def __init__(
        self, names: Sequence[str], root: str, max_model_len: int, engine: AsyncLLM, lora_folders: Sequence[str] = ()
    ) -> None:
        """Take the folders from which clients may load adapters, and the engine, which loads them."""
        self.names = tuple(names)
        self._root = root
        self._max_model_len = max_model_len
        self._created = int(time.time())
        self._engine = engine
        self._folders = lora_folders
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
        known = ", ".join(self.names)
        raise not_found(f"The model `{name[:200]}` does not exist. Valid aliases: {known}.", "model")

    def name_in_reply(self, name: str | None) -> str:
        """Return the model name for the reply to a request that `check` has accepted."""
        return self.names[0] if not name or name in self.names else name

    def show(self) -> dict[str, Any]:
        """Return the list of models: the model's names first, then the adapters."""
        cards = [self._card(name, self._root, None, self._max_model_len) for name in self.names]
        for name, adapter in self._adapters.items():
            cards.append(self._card(name, adapter.lora_path, self.names[0], None))
        return {"object": "list", "data": cards}

    async def init_static_loras(self, modules: Mapping[str, str]) -> None:
        """Load the adapters that the server starts with, by name and path.

        Raises:
            MinivllmError: one of them cannot be served.
        """
        for name, path in modules.items():
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
        if not name or not request.lora_path:
            raise _invalid("lora_name and lora_path must both be given")
        added: LoRARequest | None = None
        try:
            async with self._changing:
                before = self._adapters.get(name)
                folder = self._folder_of(request)
                # Also one that replaces another has an id of its own: requests in progress keep
                # the other.
                added = LoRARequest(name, next(self._ids), folder)
                await self._add(added)
        except BaseException as error:
            if added is not None:
                # Some cores may have it, and no request can find it.
                await self._engine.remove_lora(added.lora_int_id)
            if isinstance(error, MinivllmError) and not isinstance(error, RequestError):
                raise _invalid(str(error)) from None
            raise
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
            raise _invalid("lora_name must be given")
        async with self._changing:
            adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise not_found(f"The lora adapter '{name[:200]}' cannot be found.")
        # In the cores it stays until its last request has ended.
        await self._engine.remove_lora(adapter.lora_int_id)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _folder_of(self, request: LoadLoRAAdapterRequest) -> str:
        """Return the adapter's folder, if a client may load it under this name."""
        check_name(request.lora_name)
        self._check_free(request.lora_name, request.load_inplace)
        folder = adapter_folder(request.lora_path, self._folders)
        if folder is None:
            shown = request.lora_path[:200].encode("utf8", "backslashreplace").decode()
            raise not_found(f"Loading lora {request.lora_name} failed: No adapter found for {shown}")
        return folder

    async def _add(self, adapter: LoRARequest) -> None:
        await self._engine.add_lora(adapter)
        self._adapters[adapter.lora_name] = adapter

    def _check_free(self, name: str, load_inplace: bool = False) -> None:
        require(name not in self.names, f"{name!r} is the name of the model itself; give the adapter another one")
        is_free = name not in self._adapters or load_inplace
        require(is_free, f"the adapter {name!r} is already loaded; set load_inplace to replace it")

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
        }


def _invalid(message: str) -> RequestError:
    return RequestError(message, HTTPStatus.BAD_REQUEST, "InvalidUserInput")
