"""The interface of KV connectors, which move keys and values between this engine and others, or a
store.

A connector has two sides. One object sits beside the scheduler and decides what to move; one sits
in each rank and moves it. What the first decides travels to the second with the step, as
`KVConnectorMetadata`; what the second has done comes back with the step's output, as
`KVConnectorOutput`. The engine knows connectors only through this interface.

The calls of one step, in order:

    scheduler   schedule()   get_num_new_matched_tokens, update_state_after_alloc for each request that may be
                             admitted, request_finished for each that ends; last build_connector_meta
    worker                   handle_preemptions, bind_connector_metadata, start_load_kv
                             for each layer: wait_for_layer_load, attention, save_kv_layer
                             wait_for_save, get_finished, get_block_ids_with_load_errors, clear_connector_metadata
    scheduler   update_from_output()   update_connector_output; then finished transfers are acted on

A step without tokens calls all of the worker's methods except the per-layer ones. No torch at run
time.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/base.py` (`KVConnectorBase_V1`),
`vllm/v1/outputs.py` (`KVConnectorOutput`), `vllm/distributed/kv_transfer/kv_connector/utils.py`
(`KVOutputAggregator`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from minivllm.config.cache import kv_cache_layout
from minivllm.config.kv_transfer import KVTransferConfig

if TYPE_CHECKING:
    import torch

    from minivllm.core.block_pool import BlockPool, KVCacheBlock
    from minivllm.core.request import Request
    from minivllm.core.scheduler_output import SchedulerOutput

KVTransferParams = dict[str, Any]
"""`kv_transfer_params` of a request: what a proxy, or another engine, tells the connector. Plain
data, as in JSON.
"""
KVCaches = Mapping[str, "tuple[torch.Tensor, ...]"]
"""The cache by layer, in the order of the layers. Each has keys and values, [blocks, block_size,
kv_heads, head_dim] each; an int8 cache then has their scales, [blocks, kv_heads, block_size] each,
float32. Latent attention (MLA) has one tensor, [blocks, block_size, head_dim], as if of one head.
All are contiguous, and the first dimension is the block's id. A connector moves all tensors of a
layer.
"""


class KVConnectorRole(Enum):
    """The side of a connector: the scheduler's or a worker's."""

    SCHEDULER = 0
    WORKER = 1


@dataclass(frozen=True, kw_only=True)
class KVConnectorConfig:
    """A connector's view of the engine it belongs to.

    - `model_fingerprint`: equal for two engines that compute the same keys and values for the same
      tokens, up to rounding: the model, its weights, the dtype of the computation, and the
      drafter.
    - `block_size` in tokens, `num_gpu_blocks` of the pool, the null block (id 0) included.
    - `kv_cache_dtype`: what the cache stores, such as "float32".
    - `tensor_parallel_rank`: 0 on the scheduler's side.
    - `use_eagle`: as in `SchedulerConfig`.
    - `device`: "cpu" or "cuda".
    """

    kv_transfer_config: KVTransferConfig
    model_fingerprint: str
    block_size: int
    num_gpu_blocks: int
    kv_cache_dtype: str
    device: str = "cpu"
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    use_eagle: bool = False

    @property
    def kv_cache_layout(self) -> str:
        """Return the order of a block's dimensions in memory."""
        return kv_cache_layout(self.device)


class KVConnectorMetadata:
    """Instructions from the scheduler's side to the workers' sides for one step: plain data, of a
    class that each connector defines.
    """


@dataclass(slots=True)
class KVConnectorOutput:
    """The report of the workers' sides that comes with a step's output.

    - `finished_sending`, `finished_recving`: requests whose transfer is over, on all ranks.
      `failed_recving`: received requests for which nothing usable has arrived.
    - `invalid_block_ids`: blocks that should have been loaded within the step and hold nothing
      valid, so that whatever the step has computed may be wrong.
    - `kv_connector_stats`: counts for metrics, of the connector's own making;
      `kv_connector_worker_meta`: further messages of the ranks to the scheduler's side
      (`build_connector_worker_meta`), as a list.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_stats: dict[str, Any] | None = None
    kv_connector_worker_meta: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not any(getattr(self, field.name) for field in fields(self))


def joined_stats(stats: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the counts of several ranks or connectors as one: numbers are added, lists joined."""
    joined: dict[str, Any] = {}
    for counts in filter(None, stats):
        for name, value in counts.items():
            # `+` adds numbers and joins lists of observations.
            joined[name] = joined[name] + value if name in joined else value
    return joined or None


class KVConnectorBase_V1:
    """One side of a connector. Methods of the other side are never called on it.

    The two sides may be separate classes, each with its half of these methods, or one class that is
    instantiated twice. The methods that raise `NotImplementedError` must be implemented; all others
    are optional.

    The constructor must not block on other engines. An exception from a method ends the step as any
    other failure does, so trouble with another engine is reported through `KVConnectorOutput`
    instead.
    """

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Store the arguments; subclasses raise `MinivllmError` for settings that they cannot work
        with.
        """
        self.config = config
        self.role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Receive the cache's tensors; called once, before the first step."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Store what the scheduler's side has built for this step."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the step's metadata at its end."""
        self._connector_metadata = None

    def handle_preemptions(self, connector_metadata: KVConnectorMetadata) -> None:
        """Finish reading blocks that were freed: this step's tokens are about to overwrite them."""

    def start_load_kv(self) -> None:
        """Start the loads that the metadata orders, before the forward pass."""
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until all keys and values to be loaded for this layer within the step are in the
        cache.
        """

    def save_kv_layer(self, layer_name: str, kv_layer: "tuple[torch.Tensor, ...]", attn_metadata: Any) -> None:
        """Start to save this layer, now that the step's keys and values are in it; see `KVCaches`
        for `kv_layer`.

        If the layers ran in a CUDA graph, `attn_metadata` is None and this is called for all of
        them afterwards.
        """

    def wait_for_save(self) -> None:
        """Wait until a later step may overwrite the cache without harm to this step's saves."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose asynchronous transfers on this rank have finished since the
        last call, as (sent, received).

        `finished_req_ids`: requests that have ended since the last step. Return as sent only
        requests whose blocks `request_finished` asked to keep, and as received only those that load
        asynchronously, each once.
        """
        return set(), set()

    def get_failed_recving(self) -> set[str]:
        """Return those of the requests just returned as received for which nothing usable has
        arrived.

        In vLLM: `failed_recving` of `get_transfer_results`.
        """
        return set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose load within the step has failed: the step is then dropped, and the
        engine starts over. Asynchronous loads have `get_failed_recving` instead.
        """
        return set()

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """Return this rank's counts since the last call, for metrics, or None; see also
        `take_stats`.
        """
        return None

    def build_connector_worker_meta(self) -> Any:
        """Return any further message to the scheduler's side after this step, or None."""
        return None

    def get_handshake_metadata(self) -> Any:
        """Return what other engines need to reach this rank: plain data, or None. Called once,
        after `register_kv_caches`.
        """
        return None

    def reset(self) -> None:
        """Abandon all loads on this rank after a failed step. Sends continue; see `start_over`.

        When it returns, nothing writes into the cache any more, and no load will be reported as
        received or failed.
        """

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the `get_handshake_metadata` of all ranks, by rank; called once, before the first
        step.
        """

    def bind_gpu_block_pool(self, block_pool: "BlockPool") -> None:
        """Store the block pool; called at startup and whenever the engine starts over with a new
        one.
        """

    def on_new_request(self, request: "Request") -> None:
        """Check a new request; called before any other method that gets it.

        Raises:
            MinivllmError: the request's `kv_transfer_params` are invalid, so the request is
                refused.
        """

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens the connector could load beyond the first `num_computed_tokens`,
        which are in the cache.

        May be called several times for one request and must have no side effects.

        Returns:
            (n, False): n tokens, which are loaded within the step that admits the request. (n,
            True): n > 0 tokens, which are loaded while other steps run; the request waits, and
            holds blocks. (None, False): not known yet. Others go first, and it is called again in
            the next step.

            It is not called again for a request whose load has failed, nor for one that computes
            its whole prompt (`Request.skip_reading_prefix_cache`); `update_state_after_alloc` then
            gets 0 tokens.

            `num_computed_tokens` + n may be all tokens of the request: the last one is computed all
            the same. A load within the step may cover at most all tokens but the last.
        """
        raise NotImplementedError

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """Take note of a request's blocks (its whole table) and of how many tokens to load into
        them.

        Called for each request that is admitted, even with 0 tokens to load. A block with a hash
        holds tokens already; blocks that are loaded asynchronously have no hash yet.
        """
        raise NotImplementedError

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Return the ranks' instructions for this step, and forget them. Must not change
        `scheduler_output`.
        """
        raise NotImplementedError

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take note of the ranks' report on a step."""

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """Take note that a request has ended, in whatever state; called once, before its blocks are
        freed.

        Returns:
            Whether its blocks are still needed, and so kept until `finished_sending` names the
            request; and the `kv_transfer_params` for its client, or None.
        """
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Return whether the engine must keep stepping, without tokens, for work that no request
        waits for.

        It keeps stepping anyway while a request waits for keys and values, or blocks wait to be
        sent.
        """
        return False

    def release_gpu_blocks(self) -> bool:
        """Release at once the blocks held for copies out of the cache; return whether any block is
        free now.

        Called when a running request finds no free block, before another request is preempted. The
        ranks finish these copies before the next forward pass. Not in vLLM, which preempts requests
        even when blocks are about to become free.
        """
        return False

    def take_stats(self) -> dict[str, Any] | None:
        """Return what the scheduler's side has counted since the last call, or None."""
        return None

    def tier_state(self) -> dict[str, int] | None:
        """Return the counts of "blocks", "used", "loading" and "storing" of the connector's own
        tier, for display.
        """
        return None

    def reset_cache(self) -> bool | None:
        """Forget what is stored elsewhere, along with `reset_prefix_cache`. Return whether it was
        forgotten; None if there is nothing to forget.
        """
        return None

    def start_over(self) -> None:
        """Start over after a failed step, in which the ranks may or may not have followed their
        instructions. Not in vLLM.

        Requests that survive it are computed here from their first token, and their loads are
        abandoned. Blocks that `request_finished` asked to keep are still kept, unchanged: the next
        step must tell the ranks again of all sends that `update_connector_output` has not reported
        as finished, even if they were told before.
        """

    # Both sides

    def shutdown(self) -> None:
        """End threads and connections. A second call does nothing."""
