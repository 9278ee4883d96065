"""The TCP connector: a decode engine reads blocks from a prefill engine over a socket."""
