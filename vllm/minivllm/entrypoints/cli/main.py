"""`minivllm serve MODEL [flags named as vLLM's]`, `minivllm chat` and `minivllm proxy`.

In vLLM v0.33.0: `vllm/entrypoints/cli/main.py`, `serve.py`, `openai.py`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

import minivllm
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.config.flags import FlexibleArgumentParser, HelpFormatter, add_flags
from minivllm.entrypoints.cli.chat import ChatArgs, chat
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.proxy.settings import ProxyArgs
from minivllm.errors import EngineDeadError, MinivllmError, WorkerDiedError
from minivllm.platforms.child_main import leave
from minivllm.platforms.collector import while_loading

Settings = TypeVar("Settings")
KEY_VARIABLES = ("MINIVLLM_API_KEY", "VLLM_API_KEY")
NOT_FLAGS = {"model", "parts", "multiprocess"}


class _Parser(FlexibleArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:  # of a command, whose parser alone knows its flags
            self.refuse(unknown[0])
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        raise MinivllmError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; 2 if the request cannot be carried out, after
    one line that says why.
    """
    try:
        parsed = _parser().parse_args(arguments)
        return COMMANDS[parsed.command](parsed)
    except (MinivllmError, EngineDeadError, WorkerDiedError) as error:
        print(f"minivllm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run() -> NoReturn:
    """Run the console script: `main` as a process."""
    for _ in range(3):  # or what is opened next would be taken for a closed standard stream
        if (fd := os.open(os.devnull, os.O_RDWR)) > 2:
            os.close(fd)
            break
    leave(main())


def _parser() -> argparse.ArgumentParser:
    from minivllm.engine.arg_utils import EngineArgs

    parser = _Parser(prog="minivllm", description="A small serving engine with vLLM's names.")
    parser.add_argument("--version", action="version", version=minivllm.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", "[MODEL]", "An OpenAI-compatible server. The flags are vLLM's.")
    chats = _add_command(commands, "chat", "", "A chat in the terminal with a running server, or with one of its own.")
    proxy = _add_command(
        commands,
        "proxy",
        "--prefill URL [URL …] --decode URL [URL …]",
        "One address for servers that compute prompts and servers that generate (--kv-transfer-config).",
    )
    add_flags(proxy, ProxyArgs, "Proxy")
    add_flags(chats, ChatArgs, "Chat")
    serve.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="a directory or a name on the Hub; the embedded one"
    )
    serve.add_argument("--model", help="the same")
    add_flags(serve, FrontendArgs, "Frontend")
    EngineArgs.add_cli_args(serve, NOT_FLAGS)
    return parser


def _add_command(commands: Any, name: str, arguments: str, description: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=description.split(".")[0],
        usage=f"minivllm {name} {arguments} [flags]",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )


def _settings(kind: type[Settings], parsed: argparse.Namespace) -> Settings:
    return kind(**{field.name: getattr(parsed, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _proxy(parsed: argparse.Namespace) -> int:
    settings = _settings(ProxyArgs, parsed)

    from minivllm.entrypoints.proxy.serve import serve

    return serve(settings)


def _serve(parsed: argparse.Namespace) -> int:
    from minivllm.engine.arg_utils import EngineArgs

    # Process lists show command lines, so a key belongs into the environment.
    keys = [os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)]
    parsed.api_key = parsed.api_key or keys[:1]
    settings = _settings(FrontendArgs, parsed)
    model = parsed.model_tag or parsed.model
    parsed.model = model or EMBEDDED_MODEL
    parsed.multiprocess = True
    args = EngineArgs.from_cli_args(parsed)
    # A mistyped model must not wait for torch either.
    ModelConfig.from_pretrained(args.model)

    # torch and FastAPI come only now: a mistyped flag is told at once
    with while_loading():
        from minivllm.entrypoints.openai.api_server import serve
        from minivllm.entrypoints.openai.chat_template import PLAIN

    return serve(args, settings, None if model else PLAIN)


COMMANDS = {"serve": _serve, "chat": lambda parsed: chat(_settings(ChatArgs, parsed)), "proxy": _proxy}
