"""The bench every script works at: devices, timing, tables, progress, flags, results. No torch at import."""
