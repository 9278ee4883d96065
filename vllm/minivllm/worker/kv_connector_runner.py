"""A rank's side of a KV connector, and the calls to it around the forward pass.

Between layers, a connector may wait for what it loads and start saving what was computed, so
transfers and computation overlap. Nothing can be called inside a CUDA graph, so there the runner
waits for all layers before the graph and saves them after it.

In vLLM v0.33.0: `vllm/v1/worker/gpu/kv_connector.py` (`ActiveKVConnector`),
`maybe_transfer_kv_layer` in `vllm/model_executor/layers/attention/kv_transfer_utils.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minivllm.config import ModelConfig
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorOutput
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.models.forward_context import Attention
from minivllm.worker.latent_attention import LatentCache
from minivllm.worker.paged_attention import AttentionMetadata, LayerCache

SAMPLED_PLACES, SAMPLED_BYTES = 16, 4096


class KVConnectorRunner:
    """The hooks that the runner calls around a step's forward pass. Without a connector, and in a
    warm-up step, they do nothing.

    `kv_caches` maps layer names to tensors: the model's layers in order, then its drafter's.
    """

    def __init__(
        self,
        connector: KVConnectorBase_V1 | None = None,
        kv_caches: Mapping[str, tuple[torch.Tensor, ...]] | None = None,
        num_layers: int = 0,
    ) -> None:
        self.connector = connector
        self.kv_caches = kv_caches or {}
        names = list(self.kv_caches)
        self.layer_names = names[:num_layers]
        self.drafter_names = names[num_layers:]
        # The connector during a step that has metadata for it.
        self._active: KVConnectorBase_V1 | None = None
        self._output: KVConnectorOutput | None = None
        if connector is not None:
            connector.register_kv_caches(self.kv_caches)

    def pre_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Tell the connector what this step transfers, and let it start loading."""
        metadata = scheduler_output.kv_connector_metadata
        if self.connector is None or metadata is None:
            return
        self._active = self.connector
        if next(iter(self.kv_caches.values()))[0].is_cuda:
            # The step before may still write to freed blocks, and a thread that loads or sends uses no
            # streams. What a connector copies on streams of its own goes on.
            torch.cuda.current_stream().synchronize()
        if scheduler_output.preempted_req_ids:
            self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv()

    def around(self, attention: Attention, metadata: AttentionMetadata) -> Attention:
        """Return the attention function of a step, wrapped so that the connector is called before
        and after each layer.
        """
        connector = self._active
        if connector is None:
            return attention

        def attend(layer_index: int, *inputs: Any) -> torch.Tensor:
            name = self.layer_names[layer_index]
            connector.wait_for_layer_load(name)  # meanwhile the layers before have been computed
            out = attention(layer_index, *inputs)
            connector.save_kv_layer(name, self.kv_caches[name], metadata)
            return out

        return attend

    def wait_for_layers(self, names: list[str]) -> None:
        """Wait until all of these layers are loaded, before a CUDA graph or a drafter."""
        if self._active is not None:
            for name in names:
                self._active.wait_for_layer_load(name)

    def save_layers(self, names: list[str]) -> None:
        """Save all of these layers at once, after a CUDA graph or a drafter."""
        if self._active is not None:
            for name in names:
                # A drafter, and a graph, have no metadata.
                self._active.save_kv_layer(name, self.kv_caches[name], None)

    def post_forward(self, scheduler_output: SchedulerOutput) -> None:
        """End the step's transfers if no drafter has layers to compute."""
        if not self.drafter_names:
            self.finalize_step(scheduler_output)

    def no_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Begin and end the transfers of a step without tokens."""
        self.pre_forward(scheduler_output)
        self.finalize_step(scheduler_output)

    def finalize_step(self, scheduler_output: SchedulerOutput) -> None:
        """End the step's transfers if they are still open: wait for saves that must finish before
        the next step, and record what was received and sent.
        """
        connector = self._active
        if connector is None:
            return
        output = KVConnectorOutput()
        if scheduler_output.num_scheduled_tokens:  # else there was no forward pass
            self.save_layers(self.drafter_names)
        connector.wait_for_save()
        output.finished_sending, output.finished_recving = connector.get_finished(scheduler_output.finished_req_ids)
        output.failed_recving = connector.get_failed_recving()
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        meta = connector.build_connector_worker_meta()
        output.kv_connector_worker_meta = None if meta is None else [meta]
        connector.clear_connector_metadata()
        self._active = None
        self._output = None if output.is_empty() else output

    def take_output(self) -> KVConnectorOutput | None:
        """Return what the last step transferred, and clear it."""
        output, self._output = self._output, None
        return output

    def reset(self) -> None:
        """Abandon unfinished loads after a failed step."""
        self._active = None
        self._output = None
        if self.connector is not None:
            self.connector.clear_connector_metadata()
            self.connector.reset()

    def shutdown(self) -> None:
        """Shut down the connector, if there is one."""
        if self.connector is not None:
            self.connector.shutdown()


def tensors_of(cache: LayerCache | LatentCache) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a layer's cache: keys, values and any scales, or the latents.

    Their dimensions are in the order of memory, so that a block is contiguous.
    """
    return tuple(
        tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        for tensor in cache
        if tensor is not None
    )


def model_fingerprint(model: str | Path, config: ModelConfig, *further: object) -> str:
    """Return a hash that two engines share if they compute the same keys and values.

    It covers the model's config, a sample of its files' bytes, and the `further` objects. A model
    given by its name on the Hugging Face Hub has no files here, so its name stands in for them.
    """
    seen = hashlib.sha256(repr((asdict(config), further)).encode())
    files = sorted(Path(model).glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        seen.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(SAMPLED_PLACES):
                # Evenly from the first byte to the last.
                opened.seek(place * max(0, size - SAMPLED_BYTES) // (SAMPLED_PLACES - 1))
                seen.update(opened.read(SAMPLED_BYTES))
    if not files:
        seen.update(str(model).encode())
    return seen.hexdigest()[:32]
