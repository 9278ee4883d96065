"""Connectors, which move keys and values to and from other engines or a store. In vLLM:
`vllm/distributed/kv_transfer/`.

`core/kv_connector.py` defines the interface and when each method is called; `factory.py` finds a connector
by its name.

- `example/`: blocks as files in a folder that engines share. The simplest one, to be read first.
- `tcp/`, `nixl/`: blocks from another engine's memory, over plain TCP or by NIXL. What both share,
  `pull_*.py`: which blocks are kept for whom and for how long, and what a proxy carries between two
  engines.
- `offload/`: a second tier of the cache, in host memory.
"""
