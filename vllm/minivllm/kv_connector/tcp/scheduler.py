"""The scheduler's side of the TCP connector: that of all that pull, with addresses and loads within a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorOutput, KVTransferParams
from minivllm.core.request import Request
from minivllm.kv_connector.pull_scheduler import PullConnectorMetadata, PullConnectorScheduler, ReadOrder
from minivllm.kv_connector.tcp.settings import TCPSettings

if TYPE_CHECKING:
    from minivllm.core.block_pool import KVCacheBlock


@dataclass
class TCPConnectorMetadata(PullConnectorMetadata):
    """`blocks_to_send`: the blocks of `reqs_to_send`; `within_step`: this step's tokens need what is read in it."""

    blocks_to_send: dict[str, list[int]] = field(default_factory=dict)
    within_step: bool = False


class TCPConnectorScheduler(PullConnectorScheduler):
    """See `PullConnectorScheduler`: which blocks are kept and which are read is decided alike."""

    def __init__(self, config: KVConnectorConfig, settings: TCPSettings) -> None:
        super().__init__(config, settings.lease_duration)
        self.host, self.port = settings.host, settings.port
        self._layerwise = settings.layerwise
        self._blocks: dict[str, list[int]] = {}  # of the requests that are held

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Rank 0's address is what other engines are told."""
        if metadata.get(0):
            self.port = metadata[0]["port"]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Layer by layer, the request is admitted at once, and its prompt's last token computed in the same step."""
        found, waits = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not (self._layerwise and waits and found):
            return found, waits
        return min(found, request.num_prompt_tokens - 1 - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """A block that is loaded within the step may have its hash already, so its place is told by the tokens."""
        if not (self._layerwise and num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        claim = self._claim_of.get(request.request_id)
        if claim is None or claim.is_over:
            return
        end = min(claim.remote.num_tokens or request.num_prompt_tokens, request.num_prompt_tokens - 1)
        start = (end - num_external_tokens) // self.config.block_size * self.config.block_size
        claim.reader, claim.is_over = request.request_id, True  # it is read in this step, well or not
        request.kv_transfer_params = {**(request.kv_transfer_params or {}), "do_remote_prefill": False}
        block_ids = tuple(block.block_id for block in blocks[start // self.config.block_size :])
        self._next.reqs_to_recv[request.request_id] = ReadOrder(claim.remote, block_ids, start, end)

    def build_connector_meta(self) -> TCPConnectorMetadata:
        """See `PullConnectorScheduler`."""
        decided = super().build_connector_meta()
        blocks = {request_id: self._blocks[request_id] for request_id in decided.reqs_to_send}
        return TCPConnectorMetadata(**vars(decided), blocks_to_send=blocks, within_step=self._layerwise)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See `PullConnectorScheduler`."""
        super().update_connector_output(output)
        for request_id in output.finished_sending:
            self._blocks.pop(request_id, None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """See `PullConnectorScheduler`; the ranks are told the blocks, so that nobody can read others."""
        keeps, params = super().request_finished(request, block_ids)
        if keeps and params is not None:
            self._blocks[request.request_id] = params["remote_block_ids"][0]
        return keeps, params
