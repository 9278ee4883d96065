"""Where ranks run: in this process, a process each, or as actors of Ray."""
