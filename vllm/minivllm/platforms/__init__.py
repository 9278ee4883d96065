"""The differences between machines: devices, threads, memory, Triton or its interpreter."""
