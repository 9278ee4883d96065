"""Units of memory and rates."""

GIB = 2**30
TERA = 1e12
