"""Keep schemathesis' responses short: they end with the context unless a request says otherwise."""

import schemathesis

MAX_OUTPUT_TOKENS = 4


@schemathesis.hook
def before_call(context, case, kwargs) -> None:
    """Give a response that has no limit, or a high one, this one."""
    if case.operation.path == "/v1/responses" and isinstance(case.body, dict):
        limit = case.body.get("max_output_tokens")
        if limit is None or (isinstance(limit, int) and limit > MAX_OUTPUT_TOKENS):
            case.body["max_output_tokens"] = MAX_OUTPUT_TOKENS
