"""Units of memory and of rates."""

GIB = 2**30
TERA = 1e12
