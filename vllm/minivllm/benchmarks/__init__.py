"""What loads a server and measures what its clients see. In vLLM v0.33.0: `vllm/benchmarks/`."""
