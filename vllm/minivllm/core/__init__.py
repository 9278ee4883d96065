"""Requests, KV-cache blocks and the scheduler. No torch: all of this runs on the host."""
