"""The README's figure: the request that all lessons follow, from beginning to end."""
