"""What differs between machines: devices, threads, memory, Triton or its interpreter."""
