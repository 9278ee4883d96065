"""From prompts to completions: input and output processing around the core's loop of schedule, execute, update."""
