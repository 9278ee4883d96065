"""The commands `minivllm serve`, `minivllm proxy` and their flags."""
