"""One decoder for the Llama, Qwen2, Qwen3, Mistral and (dense) DeepSeek-V2 families, and the
loading of its weights.
"""
