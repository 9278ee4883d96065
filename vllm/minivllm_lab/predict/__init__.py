"""Predict what vLLM's scheduler does in its next step: rounds from recorded steps, and from random
workloads.
"""
