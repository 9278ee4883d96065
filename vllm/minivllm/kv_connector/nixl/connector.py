"""Keys and values read straight from another engine's memory, by NIXL (RDMA, shared memory, TCP), as vLLM does it.

Pull mode: the decode engine reads. Prefill and decode engine need not know each other before a proxy brings them a
request: `kv_transfer_params` says where the blocks are (`pull_params`), the side channel how to reach them
(`nixl.side_channel`), leases how long they are kept (`pull_leases`).

In vLLM v0.33.0: `NixlConnector` in `vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py`. Not here: push
mode, pulls of a prefill engine from a decode engine (`bidirectional_kv_xfer` with its `kv_recompute_threshold`),
engines that are divided otherwise than their peers, a host buffer.
"""

from minivllm.config.checks import positive_seconds, refuse_unknown
from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.scheduler import NixlConnectorScheduler
from minivllm.kv_connector.pull_connector import PullConnector

SECONDS = {"kv_lease_duration": 30.0, "handshake_timeout": 5.0, "read_timeout": 60.0}
"""Keys of `kv_connector_extra_config`, and what they are by default."""


class NixlConnector(PullConnector):
    """Both sides; the scheduler's imports no nixl."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Raises `MinivllmError` for settings that it does not know or cannot serve."""
        super().__init__(config, role)
        settings = check_settings(config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = NixlConnectorScheduler(config, settings["kv_lease_duration"])
            return
        from minivllm.kv_connector.nixl.agent import NixlAgent  # torch
        from minivllm.kv_connector.nixl.worker import NixlConnectorWorker

        backends = config.kv_transfer_config.get_from_extra_config("backends", ["UCX"])
        self.worker_side = NixlConnectorWorker(
            config,
            lambda name: NixlAgent(name, backends),
            lease_duration=settings["kv_lease_duration"],
            handshake_timeout=settings["handshake_timeout"],
            read_timeout=settings["read_timeout"],
        )


def check_settings(config: KVConnectorConfig) -> dict[str, float]:
    """Returns the times in `kv_connector_extra_config`, in seconds; see `SECONDS`.

    Raises:
        MinivllmError: a key that is not known, a wrong value, or an engine that it cannot serve.
    """
    transfer = config.kv_transfer_config
    if config.pipeline_parallel_size > 1:
        raise MinivllmError("NixlConnector needs pipeline_parallel_size 1: use tensor_parallel_size")
    if transfer.kv_buffer_device not in (None, config.device):
        raise MinivllmError(
            f"kv_buffer_device is {transfer.kv_buffer_device!r} and the cache is on {config.device!r}: NixlConnector "
            "reads the cache itself, so leave kv_buffer_device out"
        )
    refuse_unknown("NixlConnector has no setting", transfer.kv_connector_extra_config, (*SECONDS, "backends"))
    backends = transfer.get_from_extra_config("backends", ["UCX"])
    if not isinstance(backends, list) or not backends or not all(isinstance(backend, str) for backend in backends):
        raise MinivllmError(f'backends is {backends!r}; it must be a list of names, as ["UCX"]')
    return {
        key: positive_seconds(key, transfer.get_from_extra_config(key, default)) for key, default in SECONDS.items()
    }
