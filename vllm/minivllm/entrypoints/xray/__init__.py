"""The page that shows each step of a running server."""
