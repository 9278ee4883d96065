"""A second tier of the KV cache in host memory: `kv_offloading_size`.

It extends the prefix cache. What the first tier has computed is copied out, and a request whose
prefix the first tier does not have any more gets it back by a copy, while others run. See
`core.kv_offload` for the books, `offload.scheduler` for what is copied when, `offload.worker` for
how.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`
(`SimpleCPUOffloadConnector`). Its `OffloadingConnector` is the same here: options of both are
taken.
"""
