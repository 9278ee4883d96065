"""Speculative decoding on the worker: who proposes drafts, and how they are verified."""
