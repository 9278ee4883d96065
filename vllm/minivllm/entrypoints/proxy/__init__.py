"""A proxy before servers that compute prompts and servers that generate."""
