"""Keys and values read straight from another engine's memory, by NIXL (RDMA, shared memory, TCP),
as vLLM does it.

Pull mode: the decode engine reads. Prefill and decode engine need not know each other before a
proxy brings them a request: `kv_transfer_params` says where the blocks are (`pull_params`), the
side channel how to reach them (`nixl.side_channel`), leases how long they are kept (`pull_leases`).

In vLLM v0.33.0: `NixlConnector` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py`. Not here: push mode, pulls of a
prefill engine from a decode engine (`bidirectional_kv_xfer` with its `kv_recompute_threshold`),
engines that are divided otherwise than their peers, a host buffer.
"""
