"""The second tier of the KV cache, in host memory: blocks that were evicted are copied back."""
