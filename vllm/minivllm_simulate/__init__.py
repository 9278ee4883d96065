"""Analytical models of hardware, memory, step cost and workloads. Imports no torch."""
