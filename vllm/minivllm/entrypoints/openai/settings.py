"""The server's flags, apart from those of the engine.

In vLLM v0.33.0: `vllm/entrypoints/common/cli_args.py` (`FrontendArgs`). Names and defaults are
vLLM's.
"""

from dataclasses import dataclass, field

from minivllm.config.checks import is_count, is_number, require, require_choice, require_counts

CONTENT_FORMATS = ("auto", "string", "openai")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True, kw_only=True)
class HttpArgs:
    """The address of an HTTP server and its shutdown settings, which `http_server.py` needs for any
    server.
    """

    host: str | None = None
    port: int = 8000
    shutdown_timeout: float = 0.0
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "info"

    def __post_init__(self) -> None:
        require(
            is_number(self.shutdown_timeout) and self.shutdown_timeout >= 0.0,
            f"shutdown_timeout is {self.shutdown_timeout!r}; it must be a number of seconds, 0 or more",
        )
        require_choice("uvicorn_log_level", self.uvicorn_log_level, LOG_LEVELS)


@dataclass(frozen=True, kw_only=True)
class FrontendArgs(HttpArgs):
    """Settings of the server.

    - `host`, `port`: where it listens; by default on all interfaces.
    - `api_key`: requests below /v1 must carry one of these keys.
    - `served_model_name`: the model's names in the API; default: its path or name.
    - `chat_template`: a file, or the template itself, in place of the model's own.
    - `chat_template_content_format`: a message's content is "string" or (parts) "openai"; "auto":
      as the template expects it.
    - `max_logprobs`: maximum log probabilities per position that a request may ask for; -1: the
      whole vocabulary.
    - `max_num_queued_reqs`: with more unfinished requests than this, new requests get a 503.
    - `shutdown_timeout`: seconds that open requests have to finish after SIGTERM.
    - `enable_prompt_tokens_details`: usage says how many tokens of the prompt were cached.
    - `disable_uvicorn_access_log`: no log line for each request. `uvicorn_log_level`: of uvicorn's
      own log.
    - `enable_auto_tool_choice`, `tool_call_parser`: without both, a tool_choice of "auto" is
      refused. Freely generated text is not searched for calls, whatever the parser.
    - `lora_modules`: adapters, each name=path; requests name them as their model.
      `runtime_lora_path`: folders below which POST /v1/load_lora_adapter may load others; without
      any there is no such route. In vLLM: `VLLM_ALLOW_RUNTIME_LORA_UPDATING`, and then any path.
    - `xray`: the page /xray shows each step of the engine. Not in vLLM.
    """

    api_key: list[str] = field(default_factory=list)
    served_model_name: list[str] = field(default_factory=list)
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    max_logprobs: int = 20
    max_num_queued_reqs: int | None = None
    enable_prompt_tokens_details: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    lora_modules: list[str] = field(default_factory=list)
    runtime_lora_path: list[str] = field(default_factory=list)
    xray: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_content_format(self.chat_template_content_format)
        require(
            is_count(self.max_logprobs, -1),
            f"max_logprobs is {self.max_logprobs!r}; it must be 0 or more, or -1 for the whole vocabulary",
        )
        require_counts(self, 1, "max_num_queued_reqs", may_be_none=True)


def check_content_format(value: object) -> None:
    """Raise unless the value is one of `CONTENT_FORMATS`."""
    require(
        isinstance(value, str) and value in CONTENT_FORMATS,
        f'chat_template_content_format is {value!r}; it must be "auto", "string" or "openai"',
    )
