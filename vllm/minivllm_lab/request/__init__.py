"""The figure of the README: the request that all lessons follow, from one end to the other."""
