"""The server's flags, apart from those of the engine.

In vLLM v0.33.0: `vllm/entrypoints/common/cli_args.py` (`FrontendArgs`). Names and defaults are
vLLM's, except where a line says so; vLLM has many more.
"""

from dataclasses import dataclass, field
from typing import Annotated

from minivllm.config.checks import Count, Rule, check_fields, is_count, is_number, one_of, require
from minivllm.entrypoints.openai.tool_parsers import PARSERS

CONTENT_FORMAT = one_of("auto", "string", "openai")
SECONDS = Rule(lambda value: is_number(value) and value >= 0.0, "a number of seconds, 0 or more")
LOGPROBS = Rule(lambda value: is_count(value, -1), "0 or more, or -1 for the whole vocabulary")


@dataclass(frozen=True, kw_only=True)
class HttpArgs:
    """The address of an HTTP server and its shutdown settings, which `http_server.py` needs for any
    server.
    """

    host: str | None = None
    port: int = 8000
    shutdown_timeout: Annotated[float, SECONDS] = 0.0
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: Annotated[str, one_of("critical", "error", "warning", "info", "debug", "trace")] = "info"

    def __post_init__(self) -> None:
        check_fields(self)


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
    - `allowed_origins`: web pages of these origins may call the server; "*": all of them.
    - `enable_auto_tool_choice`, `tool_call_parser`: without both, a tool_choice of "auto" is
      refused. The parser names the form in which the model writes calls of tools.
    - `lora_modules`: adapters, each name=path; requests name them as their model.
      `runtime_lora_path`: folders below which POST /v1/load_lora_adapter may load others; without
      any there is no such route. In vLLM: `VLLM_ALLOW_RUNTIME_LORA_UPDATING`, and then any path.
    - `xray`: the page /xray shows each step of the engine. Not in vLLM.
    """

    api_key: list[str] = field(default_factory=list)
    served_model_name: list[str] = field(default_factory=list)
    chat_template: str | None = None
    chat_template_content_format: Annotated[str, CONTENT_FORMAT] = "auto"
    max_logprobs: Annotated[int, LOGPROBS] = 20
    allowed_origins: list[str] = field(default_factory=list)
    max_num_queued_reqs: Count | None = None
    enable_prompt_tokens_details: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: Annotated[str, one_of(*PARSERS)] | None = None
    lora_modules: list[str] = field(default_factory=list)
    runtime_lora_path: list[str] = field(default_factory=list)
    xray: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.tool_call_parser is not None or not self.enable_auto_tool_choice
        require(names, f"enable_auto_tool_choice needs a tool_call_parser: one of {', '.join(PARSERS)}")
