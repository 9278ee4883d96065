"""One decoder for the Llama, Qwen2, Qwen3 and Mistral families, and how its weights are loaded."""
