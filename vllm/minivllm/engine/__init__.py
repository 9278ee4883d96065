"""Turn prompts into completions: input and output processing around the core's
schedule-execute-update loop.
"""
