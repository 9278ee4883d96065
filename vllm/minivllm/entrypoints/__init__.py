"""The entry points for users: `LLM`, the OpenAI server, the proxy, and the command line."""
