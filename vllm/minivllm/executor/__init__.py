"""Run the ranks in this process, in one process each, or as Ray actors."""
