"""Speculative decoding on the worker: the proposers of drafts, and the drafts' verification."""
