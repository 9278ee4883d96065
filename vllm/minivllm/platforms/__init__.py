"""The differences between machines: devices, threads, memory, and Triton or its interpreter."""
