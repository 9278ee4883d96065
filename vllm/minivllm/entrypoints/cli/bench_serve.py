"""`minivllm bench serve`: loads a server, ours or another with OpenAI's API, and prints what its clients have seen.

Flags, table and JSON are those of `vllm bench serve`. In vLLM v0.33.0: `vllm/benchmarks/serve.py` (`add_cli_args`,
`main_async`), `vllm/entrypoints/cli/benchmark/serve.py`.
"""

import argparse
import asyncio
import gc
import json
import math
import sys
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.benchmarks.client import RequestFuncOutput, SampleRequest, Target

SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
"""Fields of every request; without a flag, the server's defaults hold."""


def add_to(commands: Any) -> None:
    """Add the command to the others."""
    bench = commands.add_parser("bench", help="measures a server", description="Measure a server.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    parser = kinds.add_parser(
        "serve",
        help="loads a server and prints what its clients have seen",
        description="Load a server and print what its clients have seen. The flags are vLLM's.",
        allow_abbrev=False,
    )
    _add_server(parser.add_argument_group("server"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_traffic(parser.add_argument_group("traffic"))
    _add_result(parser.add_argument_group("result"))


def _add_server(group: Any) -> None:
    group.add_argument("--backend", choices=("openai", "openai-chat", "vllm"), default="openai")
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions, by the backend")
    group.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="of every request")
    group.add_argument("--model", help="its name or path; the first one that the server has")
    group.add_argument("--served-model-name", help="its name in requests, if --model is a path")
    group.add_argument("--tokenizer", help="a directory or a name on the Hub; the model's")
    group.add_argument("--ready-check-timeout-sec", type=int, default=0, help="wait so long for the server (0: not)")


def _add_dataset(group: Any) -> None:
    group.add_argument("--dataset-name", choices=("random", "sharegpt", "custom"), default="random")
    group.add_argument("--dataset-path", metavar="FILE", help="of sharegpt (JSON) or custom (JSON lines)")
    group.add_argument("--num-prompts", type=int, default=1000)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--input-len", type=int, help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, help="tokens to generate, for every dataset")
    group.add_argument("--random-input-len", type=int, default=1024)
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument(
        "--random-range-ratio",
        type=_json,
        default=0.0,
        help='lengths are uniform within this share of theirs; a number, or {"input": a, "output": b}',
    )
    group.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    group.add_argument("--sharegpt-output-len", type=int, help="instead of the answers' lengths")
    group.add_argument("--custom-output-len", type=int, default=256, help="-1: each line's output_tokens")
    group.add_argument("--ignore-eos", action="store_true", help="always so with random prompts")
    group.add_argument("--logprobs", type=int, metavar="K")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind)
    group.add_argument("--extra-body", type=_json, default={}, metavar="JSON", help="further fields of every request")


def _add_traffic(group: Any) -> None:
    group.add_argument("--request-rate", type=float, default=math.inf, help="requests per second; inf: all at once")
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly")
    group.add_argument("--max-concurrency", type=int, help="the most requests under way")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before, which do not count")
    group.add_argument("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_result(group: Any) -> None:
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="also e2el")
    group.add_argument("--metric-percentiles", default="99", metavar="NUMBERS")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests that meet all")
    group.add_argument("--label", help="of the result; the backend")
    group.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="further fields of the result")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with every request's figures and texts")
    group.add_argument("--append-result", action="store_true", help="as a further line of the file")
    group.add_argument("--result-dir", metavar="FOLDER")
    group.add_argument("--result-filename", metavar="FILE")


def run(given: argparse.Namespace, unknown: Sequence[str]) -> int:
    """Do what the command line says; return the exit code: 1 if no request succeeded.

    Raises:
        MinivllmError: a flag is wrong, or the server does not answer.
    """
    if unknown:
        raise MinivllmError(f"unrecognized argument {unknown[0]}; minivllm bench serve --help lists them all")
    return asyncio.run(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from minivllm.benchmarks.load import run_load
    from minivllm.benchmarks.metrics import calculate_metrics, table_of
    from minivllm.benchmarks.spec_decode import fetch_spec_decode_metrics

    _check(given)
    goodput = goodput_of(given.goodput)
    percentiles = [_number(text) for text in given.metric_percentiles.split(",")]
    names = [name for name in given.percentile_metrics.split(",") if name]
    target, tokenizer_name = await _target(given)
    samples = _samples(given, tokenizer_name)
    if given.num_warmups:
        await run_load(target, samples[:1] * given.num_warmups, max_concurrency=given.max_concurrency)
    print(_traffic(given))
    before = await fetch_spec_decode_metrics(target)
    with _no_garbage_collected(), _Progress(len(samples), not given.disable_tqdm) as progress:
        result = await run_load(
            target,
            samples,
            request_rate=given.request_rate,
            burstiness=given.burstiness,
            max_concurrency=given.max_concurrency,
            seed=given.seed,
            request_id_prefix=given.request_id_prefix,
            on_done=progress.count,
        )
    after = await fetch_spec_decode_metrics(target)
    figures = calculate_metrics(
        result,
        percentile_metrics=names,
        metric_percentiles=percentiles,
        goodput=goodput or None,
        drafts=after.since(before) if before and after else None,
    )
    for error in [error for error in figures["errors"] if error][:10]:
        print(f"a request failed: {error}", file=sys.stderr)
    print(table_of(figures, max_concurrency=given.max_concurrency, request_rate=given.request_rate))
    if given.save_result or given.append_result:
        print(f"saved to {_save(given, target, tokenizer_name, figures)}")
    return 0 if figures["completed"] else 1


def goodput_of(pairs: Sequence[str]) -> dict[str, float]:
    """Return the limits in ms by metric, from texts such as "ttft:200".

    Raises:
        MinivllmError: a text is no such pair.
    """
    found = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        try:
            found[name] = float(limit)
        except ValueError:
            raise MinivllmError(f"--goodput {pair!r} is not NAME:MS, such as ttft:200") from None
    return found


def _check(given: argparse.Namespace) -> None:
    for name, least in (("num_prompts", 1), ("max_concurrency", 1), ("num_warmups", 0), ("random_prefix_len", 0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise MinivllmError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if not given.request_rate > 0 or not given.burstiness > 0:
        raise MinivllmError("--request-rate and --burstiness must be above 0")
    if given.dataset_name != "random" and given.dataset_path is None:
        raise MinivllmError(f"--dataset-name {given.dataset_name} needs --dataset-path")


async def _target(given: argparse.Namespace) -> "tuple[Target, str]":
    """The server, and the name of its tokenizer."""
    from minivllm.benchmarks.client import Target

    url = given.base_url or f"http://{given.host}:{given.port}"
    sampling = {name: value for name in SAMPLING if (value := getattr(given, name)) is not None}
    target = Target(
        base_url=url,
        model=given.served_model_name or given.model or "",
        backend=given.backend,
        endpoint=given.endpoint,
        ignore_eos=given.ignore_eos or given.dataset_name == "random",
        logprobs=given.logprobs,
        headers=_pairs(given.header, "--header"),
        extra_body=sampling | _object(given.extra_body, "--extra-body"),
    )
    if given.model and not given.ready_check_timeout_sec:
        return target, given.tokenizer or given.model
    card = await _first_model(target, given.ready_check_timeout_sec)
    given.model = given.model or card["id"]
    name = given.served_model_name or card["id"]
    return Target(**{**vars(target), "model": name}), given.tokenizer or card.get("root") or given.model


async def _first_model(target: "Target", seconds: float) -> dict[str, Any]:
    """What the server says of its first model; waits so long for the server to come up."""
    import aiohttp

    from minivllm.benchmarks.client import new_session

    end = time.monotonic() + seconds
    async with new_session() as session:
        while True:
            try:
                async with session.get(
                    f"{target.base_url.rstrip('/')}/v1/models", headers=dict(target.headers)
                ) as reply:
                    reply.raise_for_status()
                    return (await reply.json())["data"][0]
            except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
                if time.monotonic() >= end:
                    raise MinivllmError(f"no model is served at {target.base_url}: {error}") from None
            await asyncio.sleep(0.5)


def _samples(given: argparse.Namespace, tokenizer_name: str) -> "list[SampleRequest]":
    from minivllm.benchmarks import datasets
    from minivllm.models.tokenizer import load_tokenizer

    tokenizer, number, seed = load_tokenizer(tokenizer_name), given.num_prompts, given.seed
    if given.dataset_name == "sharegpt":
        wanted = given.output_len or given.sharegpt_output_len
        return datasets.sharegpt_requests(tokenizer, given.dataset_path, number, output_len=wanted, seed=seed)
    if given.dataset_name == "custom":
        wanted = given.output_len or given.custom_output_len
        return datasets.custom_requests(tokenizer, given.dataset_path, number, output_len=wanted, seed=seed)
    return datasets.random_requests(
        tokenizer,
        number,
        input_len=given.input_len or given.random_input_len,
        output_len=given.output_len or given.random_output_len,
        range_ratio=given.random_range_ratio,
        prefix_len=given.random_prefix_len,
        seed=seed,
    )


def _traffic(given: argparse.Namespace) -> str:
    kind = "Poisson process" if given.burstiness == 1.0 else "gamma distribution"
    return (
        f"Traffic request rate: {given.request_rate}\nBurstiness factor: {given.burstiness} ({kind})\n"
        f"Maximum request concurrency: {given.max_concurrency}"
    )


def _save(given: argparse.Namespace, target: "Target", tokenizer_name: str, figures: Mapping[str, Any]) -> Path:
    """Writes the result, and returns where."""
    from minivllm.benchmarks.metrics import DETAILS

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    found: dict[str, Any] = {
        "date": now,
        "endpoint_type": given.backend,
        "backend": given.backend,
        "label": given.label,
        "model_id": given.model,
        "tokenizer_id": tokenizer_name,
        "num_prompts": given.num_prompts,
        **_pairs(given.metadata, "--metadata"),
        "request_rate": "inf" if math.isinf(given.request_rate) else given.request_rate,
        "burstiness": given.burstiness,
        "max_concurrency": given.max_concurrency,
    }
    found |= {name: value for name, value in figures.items() if given.save_detailed or name not in DETAILS}
    at_most = "" if given.max_concurrency is None else f"-concurrency{given.max_concurrency}"
    model = target.model.rsplit("/", 1)[-1]
    name = (
        given.result_filename or f"{given.label or given.backend}-{given.request_rate}qps{at_most}-{model}-{now}.json"
    )
    path = Path(given.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if given.append_result else "w") as file:
            if given.append_result and file.tell():
                file.write("\n")
            json.dump(found, file)
    except OSError as error:
        raise MinivllmError(f"the result cannot be saved: {error}") from None
    return path


@contextmanager
def _no_garbage_collected() -> Generator[None, None, None]:
    """What is here now is not looked at again and again: that would be part of the latencies."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Progress:
    """A bar on the terminal, while the requests are answered."""

    def __init__(self, number: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        shown = shown and sys.stderr.isatty()
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True)
        self._task = self._bar.add_task("requests", total=number)

    def count(self, output: "RequestFuncOutput") -> None:
        self._bar.advance(self._task)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._bar.stop()


def _pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise MinivllmError(f"{flag} {wrong[0]!r} is not NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}


def _object(value: Any, flag: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MinivllmError(f"{flag} must be a JSON object")
    return value


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 100:
        raise MinivllmError(f"--metric-percentiles has {text!r}; each must be a number from 0 to 100")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None
