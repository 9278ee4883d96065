"""One decoder for the Llama, Qwen2, Qwen3, Mistral and (dense) DeepSeek-V2 families, and how its
weights are loaded.
"""
