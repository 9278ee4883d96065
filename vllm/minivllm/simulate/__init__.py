"""What a machine holds and how long it takes, by arithmetic: hardware, memory, cost, workloads. Imports no torch."""
