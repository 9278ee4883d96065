"""Keys and values from another engine over plain TCP, for where NIXL is not installed.

The protocol between proxy and engines is NIXL's (`kv_transfer_params`, leases, heartbeats, release
when read), so both schedulers make the same decisions. The difference is how bytes move: the
prefill engine's ranks answer in threads (`tcp.worker`), and frames are authenticated and checked
(`tcp.protocol`).

Not in vLLM v0.33.0, whose connector for plain TCP (`P2pNcclConnector`, over ZeroMQ and NCCL) needs
GPUs.
"""
