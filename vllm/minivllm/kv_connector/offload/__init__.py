"""A second tier of the KV cache in host memory: `kv_offloading_size`.

It extends the prefix cache. Blocks that the first tier has computed are copied out, and a request
whose prefix has left the first tier gets it back by a copy, while other requests run. See
`core.kv_offload` for the bookkeeping, `offload.scheduler` for what is copied when, and
`offload.worker` for how.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`
(`SimpleCPUOffloadConnector`). Its `OffloadingConnector` is the same connector here: the options of
both are accepted.
"""
