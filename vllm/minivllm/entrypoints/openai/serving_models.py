"""The names that requests may use: the model's own, and those of adapters.

In vLLM v0.33.0: `vllm/entrypoints/openai/models/serving.py` (`OpenAIServingModels`),
`vllm/entrypoints/serve/lora/`.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus

from minivllm.core.lora_request import LoRARequest
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.errors import RequestError, not_found
from minivllm.entrypoints.openai.lora_modules import LoRAModulePath, adapter_folder, check_name
from minivllm.entrypoints.openai.protocol import (
    LoadLoRAAdapterRequest,
    ModelCard,
    ModelList,
    UnloadLoRAAdapterRequest,
)
from minivllm.errors import MinivllmError

PERMISSION = {
    "object": "model_permission", "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
    "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None,
    "is_blocking": False,
}  # fmt: skip
"""What OpenAI's API once said of each model."""


class OpenAIServingModels:
    """One model, under one or more names, and its adapters, each under one name."""

    def __init__(
        self,
        names: Sequence[str],
        root: str,
        max_model_len: int,
        engine: AsyncLLM | None = None,
        lora_folders: Sequence[str] = (),
    ) -> None:
        """Take the folders from which adapters may be loaded, and the engine, which only adapters
        need.
        """
        self.names = tuple(names)
        self._root = root
        self._max_model_len = max_model_len
        self._created = int(time.time())
        self._engine = engine
        self._folders = lora_folders
        self._adapters: dict[str, LoRARequest] = {}
        self._roots: dict[str, str] = {}
        """The path of each adapter as it was given."""
        self._ids = itertools.count(1)
        # Loading takes seconds, and two clients may load the same name meanwhile.
        self._changing = asyncio.Lock()

    @property
    def name(self) -> str:
        """The model's name in replies."""
        return self.names[0]

    def check(self, asked_for: str | None) -> LoRARequest | None:
        """Return the adapter that a request names; None for the model itself, whose name may be
        omitted.

        Raises:
            RequestError: it names something else.
        """
        if not asked_for or asked_for in self.names:
            return None
        adapter = self._adapters.get(asked_for)
        if adapter is None:
            known = ", ".join(self.names)
            raise not_found(f"The model `{asked_for[:200]}` does not exist. Valid aliases: {known}.", "model")
        return adapter

    def name_in_reply(self, asked_for: str | None) -> str:
        """Return the model name for the reply to a request that `check` has accepted."""
        return self.name if not asked_for or asked_for in self.names else asked_for

    def show(self) -> ModelList:
        """Return the list of models: the model's names first, then the adapters."""
        own = [self._card(name, self._root, None, self._max_model_len) for name in self.names]
        parents = {name: adapter.base_model_name or self.name for name, adapter in self._adapters.items()}
        others = [self._card(name, self._roots[name], parent, None) for name, parent in parents.items()]
        return ModelList(data=[*own, *others])

    async def init_static_loras(self, modules: Sequence[LoRAModulePath]) -> None:
        """Load the adapters that the server starts with.

        Raises:
            MinivllmError: one of them cannot be served.
        """
        for module in modules:
            self._check_free(module.name)
            adapter = LoRARequest(module.name, next(self._ids), module.path, module.base_model_name)
            await self._add(adapter, module.path)

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> str:
        """Load an adapter, replacing one of the same name if `load_inplace` is set; return the
        message for the client.

        Requests in progress keep the adapter that they began with.

        Raises:
            RequestError: there is no adapter there that may be loaded, it cannot be served, or the
                name is taken.
        """
        name, path = request.lora_name, request.lora_path
        if not name or not path:
            raise _invalid("lora_name and lora_path must both be given")
        added: LoRARequest | None = None
        try:
            async with self._changing:
                before = self._adapters.get(name)
                folder = self._folder_of(request)
                # An id of its own, also in place of another adapter: requests under way keep
                # theirs.
                added = LoRARequest(name, next(self._ids), folder)
                try:
                    await self._add(added, path)
                except MinivllmError as error:
                    raise _invalid(str(error)) from None
        except BaseException:
            await self._let_go(added)  # some cores may have it, and no request finds it
            raise
        # Only now: until the new one is loaded, requests must still find the old one.
        await self._let_go(before)
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
            gone = self._adapters.pop(name, None)
            self._roots.pop(name, None)
        if gone is None:
            raise not_found(f"The lora adapter '{name[:200]}' cannot be found.")
        # In the cores it stays until its last request has ended.
        await self._let_go(gone)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _folder_of(self, request: LoadLoRAAdapterRequest) -> str:
        """Return the adapter's folder, if a client may load it under this name."""
        try:
            check_name(request.lora_name)
            self._check_free(request.lora_name, request.load_inplace)
        except MinivllmError as error:
            raise _invalid(str(error)) from None
        folder = adapter_folder(request.lora_path, self._folders)
        if folder is None:
            shown = request.lora_path[:200].encode("utf8", "backslashreplace").decode()
            raise not_found(f"Loading lora {request.lora_name} failed: No adapter found for {shown}")
        return folder

    async def _add(self, adapter: LoRARequest, root: str) -> None:
        assert self._engine is not None
        await self._engine.add_lora(adapter)
        self._adapters[adapter.lora_name] = adapter
        self._roots[adapter.lora_name] = root

    async def _let_go(self, adapter: LoRARequest | None) -> None:
        """Tell the cores to drop an adapter that new requests can no longer find."""
        if adapter is not None and self._engine is not None:
            await self._engine.remove_lora(adapter.lora_int_id)

    def _check_free(self, name: str, load_inplace: bool = False) -> None:
        if name in self.names:
            raise MinivllmError(f"{name!r} is the name of the model itself; give the adapter another one")
        if name in self._adapters and not load_inplace:
            raise MinivllmError(f"the adapter {name!r} is already loaded; set load_inplace to replace it")

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=root,
            parent=parent,
            max_model_len=max_model_len,
            permission=[{"id": f"modelperm-{uuid.uuid4().hex[:16]}", "created": self._created, **PERMISSION}],
        )


def _invalid(message: str) -> RequestError:
    return RequestError(message, HTTPStatus.BAD_REQUEST, "InvalidUserInput")
