"""The entry points for users: `LLM`, the OpenAI server, the proxy, the command line."""
