"""A proxy in front of servers that compute prompts and servers that generate."""
