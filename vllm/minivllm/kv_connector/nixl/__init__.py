"""The NIXL connector: blocks are read from another engine's memory, over RDMA where there is any."""
