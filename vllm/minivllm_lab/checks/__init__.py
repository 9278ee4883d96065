"""Checks of a learner's code: run it within limits, trace its kernels, plug it into the engine, mutate it."""
