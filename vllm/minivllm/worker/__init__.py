"""The worker: the persistent batch, the forward pass with paged attention, and the sampler."""
