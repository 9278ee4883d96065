"""Predict what a workload does on an engine that you do not have, with the error of such predictions."""
