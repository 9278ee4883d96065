"""The code that runs on the device: the persistent batch, the forward pass over paged attention,
and the sampler.
"""
