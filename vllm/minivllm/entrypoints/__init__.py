"""Where users come in: `LLM`, the OpenAI server, the proxy, the command line."""
