"""Keys and values in files, in a folder that several engines share.

This is the simplest connector: read it first. Both sides are one class, nothing runs in a thread,
and each load and each save begins and ends within its step. With the other connectors, requests
wait outside the batch while bytes move.

One file holds one full block of a prompt, with all layers, and is named after the block's hash,
which covers its tokens, all tokens before them, and everything else they depend on. A request with
the same prefix finds its blocks, one after another. A file appears only when it is complete, and
begins with a digest of the rest, which is in the format of safetensors; a file that was truncated
or altered counts as a failed load, and is removed. What is computed after one is not saved, until
the engine has started over. Nothing is ever evicted; that is left to the owner of the folder.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py`
(`ExampleConnector`), which keeps a folder for each whole prompt and a file for each layer.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.kv_connector import (
    KVCaches,
    KVConnectorBase_V1,
    KVConnectorConfig,
    KVConnectorMetadata,
    KVConnectorRole,
)
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

if TYPE_CHECKING:
    import torch

    from minivllm.core.block_pool import KVCacheBlock
    from minivllm.core.request import Request
    from minivllm.core.scheduler_output import SchedulerOutput

logger = init_logger(__name__)
DIGEST_BYTES = 16


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    """The blocks to load within the step and to save after it: their ids, and the names of their
    files.
    """

    loads: dict[int, str] = field(default_factory=dict)
    saves: dict[int, str] = field(default_factory=dict)


@dataclass
class _Saved:
    """An unfinished request: its block table, and how many of its blocks have been saved or loaded."""

    request: "Request"
    block_ids: list[int]
    num_blocks: int


class ExampleConnector(KVConnectorBase_V1):
    """Both sides of the connector. `shared_storage_path` in `kv_connector_extra_config` is the
    folder.
    """

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Create the folder.

        Raises:
            MinivllmError: no folder is named, or it cannot be made.
        """
        super().__init__(config, role)
        path = config.kv_transfer_config.get_from_extra_config("shared_storage_path")
        if not isinstance(path, str | Path) or not str(path):
            raise MinivllmError(
                f"shared_storage_path is {path!r}; ExampleConnector needs a folder, as in "
                '{"kv_connector_extra_config": {"shared_storage_path": "/tmp/kv"}}'
            )
        # Whatever makes the bytes of a file mean something else is part of the folder's name.
        bytes_of_a_block = f"{config.block_size} {config.kv_cache_dtype} {config.kv_cache_layout}"
        kind = f"{config.model_fingerprint} {bytes_of_a_block} {config.tensor_parallel_size}"
        self.folder = Path(path) / hashlib.sha256(kind.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: it has a NUL
            why = getattr(error, "strerror", error)
            raise MinivllmError(f"shared_storage_path {str(path)!r} cannot be used: {why}") from None
        self._metadata = ExampleConnectorMetadata()
        self._requests: dict[str, _Saved] = {}
        self._asked: dict[str, int] = {}  # how many blocks each had of its own
        self._tensors: dict[str, torch.Tensor] = {}  # the cache, by layer and part
        self._saving: dict[str, torch.Tensor] = {}
        self._invalid_block_ids: set[int] = set()
        self._is_spoiled = False

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count the tokens after the first `num_computed_tokens` whose blocks all ranks have on
        disk.
        """
        if not self.config.kv_transfer_config.is_kv_consumer:
            return 0, False
        size = self.config.block_size
        # Remembered for `update_state_after_alloc`, where the prefix cache's blocks cannot be told
        # apart any more.
        self._asked[request.request_id] = num_computed_tokens // size
        first, last = num_computed_tokens // size, (request.num_tokens - 1) // size
        num_blocks = 0
        for block_hash in request.block_hashes[first:last]:
            if not self._is_complete(block_hash.hex()):
                break
            num_blocks += 1
        return num_blocks * size, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """Record which blocks to load: the ones after those that the prefix cache had."""
        size = self.config.block_size
        num_external = num_external_tokens // size
        num_known = self._asked.pop(request.request_id, request.num_computed_tokens // size)
        # A file holds one block, so each block is loaded by itself.
        for place in range(num_known, num_known + num_external):
            self._metadata.loads[blocks[place].block_id] = request.block_hashes[place].hex()
        self._requests[request.request_id] = _Saved(
            request, [block.block_id for block in blocks], num_known + num_external
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ExampleConnectorMetadata:
        """Add the prompt blocks that this step fills and that have no file yet."""
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in self._requests:
                self._requests[request_id].block_ids += block_ids or ()
        if self.config.kv_transfer_config.is_kv_producer:
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                if request_id in self._requests:
                    self._add_saves(self._requests[request_id], num_tokens)
        metadata, self._metadata = self._metadata, ExampleConnectorMetadata()
        return metadata

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request: its blocks were saved as they were computed."""
        self._requests.pop(request.request_id, None)
        self._asked.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Remove all files of this model. Return whether none is left."""
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()
        return not any(self.folder.iterdir())

    def start_over(self) -> None:
        """Forget what the failed step would have saved."""
        self._metadata = ExampleConnectorMetadata()
        self._requests.clear()

    def _add_saves(self, saved: _Saved, num_tokens: int) -> None:
        request = saved.request
        num_known = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
        # Only full blocks of the prompt: a file is found by its block's hash.
        for place in range(saved.num_blocks, num_known // self.config.block_size):
            name = request.block_hashes[place].hex()
            # Another engine may have saved the same block.
            if not self._is_complete(name):
                self._metadata.saves[saved.block_ids[place]] = name
            saved.num_blocks = place + 1

    def _is_complete(self, name: str) -> bool:
        # Each rank has its own heads in a file of its own.
        return all(self._path(name, rank).exists() for rank in range(self.config.tensor_parallel_size))

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}.kv"

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Name the tensors: each layer's parts are keys and values, with any scales, or latents."""
        for layer, parts in kv_caches.items():
            self._tensors |= {f"{layer}.{index}": part for index, part in enumerate(parts)}

    def start_load_kv(self) -> None:
        """Load all blocks; those that cannot be loaded are recorded as invalid."""
        for block_id, name in self._step.loads.items():
            if not self._load(block_id, self._path(name, self.config.tensor_parallel_rank)):
                self._invalid_block_ids.add(block_id)
                self._is_spoiled = True

    def save_kv_layer(self, layer_name: str, kv_layer: "tuple[torch.Tensor, ...]", attn_metadata: Any) -> None:
        """Copy this layer's part of the blocks that are to be saved."""
        saves = self._step.saves
        # After a failed load, steps that are already on their way compute with garbage.
        if saves and not self._is_spoiled:
            for index, part in enumerate(kv_layer):
                self._saving[f"{layer_name}.{index}"] = part[list(saves)].cpu()

    def wait_for_save(self) -> None:
        """Write the files."""
        saving, self._saving = self._saving, {}
        if not saving:
            return
        for place, name in enumerate(self._step.saves.values()):
            block = {part: tensor[place].contiguous() for part, tensor in saving.items()}
            self._write(self._path(name, self.config.tensor_parallel_rank), block)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded in this step."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def reset(self) -> None:
        """Forget the failed step."""
        self._saving = {}
        self._invalid_block_ids = set()
        self._is_spoiled = False

    @property
    def _step(self) -> ExampleConnectorMetadata:
        assert isinstance(self._connector_metadata, ExampleConnectorMetadata)
        return self._connector_metadata

    def _load(self, block_id: int, path: Path) -> bool:
        """Fill one block from its file; return whether the file was valid. An invalid file is
        removed, so that the block is computed and saved again.
        """
        from safetensors.torch import load

        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest != _digest(body):
            path.unlink(missing_ok=True)
            return False
        for part, tensor in load(body).items():
            self._tensors[part][block_id].copy_(tensor)
        return True

    def _write(self, path: Path, block: "dict[str, torch.Tensor]") -> None:
        """Write a file that becomes visible only when it is complete. A full disk costs only this
        file.
        """
        from safetensors.torch import save

        body = save(block)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(_digest(body) + body)
            # Atomic: a reader sees the whole file or none.
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            logger.warning("%s could not be written: %s", path, error)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
