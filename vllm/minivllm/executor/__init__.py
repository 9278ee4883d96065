"""Run the ranks in this process, in a process each, or as actors of Ray."""
