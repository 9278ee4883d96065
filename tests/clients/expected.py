"""The texts that vLLM's own server generates greedily for these prompts."""

PROMPT = "def add(a, b):\n    return"
COMPLETION = " a + b\n\ndef"
NUM_TOKENS = 6
QUESTION = "def add(a, b):"
ANSWER = "#\n#\n#\n"
MODEL = "tiny-python"
