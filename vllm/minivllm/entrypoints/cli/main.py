"""`minivllm serve MODEL [flags named as vLLM's]`, and `minivllm bench serve`.

In vLLM v0.33.0: `vllm/entrypoints/cli/main.py`, `serve.py`, `benchmark/serve.py`.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import minivllm
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.config.flags import add_flags, value_of
from minivllm.engine.core_entry import leave
from minivllm.entrypoints.cli import bench_serve
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.errors import EngineDeadError, MinivllmError, WorkerDiedError

KEY_VARIABLES = ("MINIVLLM_API_KEY", "VLLM_API_KEY")
NOT_FLAGS = {"model", "parts", "multiprocess"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MinivllmError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code. 2: it cannot be done as said, and one line says why."""
    try:
        given, unknown = _parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
        return bench_serve.run(given, unknown) if given.command == "bench" else _serve((given, unknown))
    except (MinivllmError, EngineDeadError, WorkerDiedError) as error:
        print(f"minivllm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def run() -> NoReturn:
    """The console script: `main` as a process."""
    leave(main())


def _parser() -> argparse.ArgumentParser:
    from minivllm.engine.arg_utils import EngineArgs

    parser = _Parser(prog="minivllm", description="A small serving engine with vLLM's names.")
    parser.add_argument("--version", action="version", version=minivllm.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="An OpenAI-compatible server. The flags are vLLM's.",
        allow_abbrev=False,
    )
    bench_serve.add_to(commands)
    serve.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="a directory or a name on the Hub; the embedded one"
    )
    serve.add_argument("--model", help="the same")
    for title, settings in (("server", FrontendArgs), ("engine", EngineArgs)):
        add_flags(serve.add_argument_group(title), settings, NOT_FLAGS)
    return parser


def _serve(parsed: tuple[argparse.Namespace, list[str]]) -> int:
    from minivllm.engine.arg_utils import EngineArgs

    given, unknown = vars(parsed[0]), parsed[1]
    model = given["model_tag"] or given["model"]
    names = {field.name for field in fields(FrontendArgs)}
    frontend = {name: value for name, value in given.items() if name in names}
    keys = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    if keys is not None and "api_key" not in frontend:
        frontend["api_key"] = [keys]
    settings = FrontendArgs(**frontend)
    own = {field.name for field in fields(EngineArgs)}
    engine = {name: value for name, value in given.items() if name in own and name != "model"}
    args = EngineArgs(model=model or EMBEDDED_MODEL, multiprocess=True, **engine, **_vllms_arguments(unknown))
    ModelConfig.from_pretrained(args.model)

    # torch and FastAPI come only now: a mistyped flag is told at once
    from minivllm.entrypoints.openai.chat_template import PLAIN
    from minivllm.entrypoints.openai.launcher import serve

    return serve(args, settings, None if model else PLAIN)


def _vllms_arguments(unknown: Sequence[str]) -> dict[str, Any]:
    """Flags that vLLM's engine has and this one lacks; `EngineArgs` accepts them, or says why not.

    Raises:
        MinivllmError: vLLM has no such flag either.
    """
    from minivllm.engine.vllm_engine_arguments import NOT_SERVED, WITHOUT_EFFECT

    found: dict[str, Any] = {}
    pending = list(unknown)
    while pending:
        flag, _, value = pending.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        negated = name.removeprefix("no_")
        if not flag.startswith("--") or (name not in (*NOT_SERVED, *WITHOUT_EFFECT) and negated == name):
            raise MinivllmError(f"unrecognized argument {flag}{_nearest(name)}")
        if negated != name:
            if negated not in (*NOT_SERVED, *WITHOUT_EFFECT):
                raise MinivllmError(f"unrecognized argument {flag}{_nearest(name)}")
            found[negated] = False
            continue
        if not value and pending and not pending[0].startswith("--"):
            value = pending.pop(0)
        found[name] = value_of(value) if value else True
    return found


def _nearest(name: str) -> str:
    from minivllm.engine.arg_utils import EngineArgs

    known = [field.name for settings in (FrontendArgs, EngineArgs) for field in fields(settings)]
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{near[0].replace('_', '-')}?" if near else "; minivllm serve --help lists them all"
