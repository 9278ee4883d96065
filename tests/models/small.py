"""The config of a model that is small enough for any test."""

SMALL = {
    "model_type": "qwen3", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
    "dtype": "float32",
}  # fmt: skip
