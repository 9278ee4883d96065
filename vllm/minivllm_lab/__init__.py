"""Shared tools of the scripts: devices, timing, tables, progress, flags, results. No torch at
import.
"""
