"""CPU forms of the kernels: loops that numba compiles, or torch, whichever is faster."""
