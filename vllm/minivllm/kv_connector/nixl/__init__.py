"""Keys and values read straight from another engine's memory, over NIXL (RDMA, shared memory, TCP),
as vLLM does it.

Pull mode: the decode engine reads. The prefill engine and the decode engine need not know each
other before a proxy brings them a request: `kv_transfer_params` says where the blocks are
(`pull_params`), the side channel says how to reach them (`nixl.side_channel`), and leases say how
long they are kept (`pull_leases`).

In vLLM v0.33.0: `NixlConnector` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/connector.py`. Not implemented here: push mode, a
prefill engine that pulls from a decode engine (`bidirectional_kv_xfer` with its
`kv_recompute_threshold`), engines whose parallel sizes differ from their peers', a host buffer.
"""
