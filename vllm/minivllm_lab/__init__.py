"""Shared tools of the scripts: devices, timing, tables, progress, flags, results. Importing it does
not import torch.
"""
