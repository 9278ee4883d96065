"""The texts that vLLM's own server generates greedily for these prompts."""

PROMPT = "def add(a, b):\n    return"
COMPLETION = " a + b\n\ndef"
NUM_TOKENS = 6
QUESTION = "def add(a, b):"
ANSWER = "#\n#\n#\n"
MODEL = "tiny-python"
CITY = {"city": {"type": "string", "enum": ["Rome"]}}
WEATHER = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
"""The parameters of a tool that a forced call soon completes."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
"""A call as the server's parser finds it. Constrained to it, the model makes it "freely"."""
FREE_CALL = {"structured_outputs": {"choice": [f"I look. {CALL}"]}}
