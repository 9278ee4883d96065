"""Run real clients against one server: `make clients`.

Each client runs in the interpreter of its own environment (`README.md`). The last lines of a
failing client are shown, and the exit code is 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_cli
from server.serving import CHAT_TEMPLATE, MODEL, Server, running

from minivllm_lab.tables import table

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
FAST, OPENAI_3 = ENVIRONMENTS / "fast", ENVIRONMENTS / "openai3"
FRAMEWORKS = dict.fromkeys(
    ("openai-agents", "pydantic-ai-slim", "instructor", "smolagents", "langchain-openai"), "agents"
) | {"litellm": "fast", "llama-index-llms-openai-like": "llama_index", "outlines": "outlines"}
"""The environment of each."""
SECONDS = 600
NAME = "tiny-python"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/models", "/health",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
"""The routes that schemathesis tries."""
RANDOM_REQUESTS, MAX_DIFFERENT = 120, 24
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 12, 32, 12
"""The load of `vllm bench serve`."""


@dataclass(frozen=True)
class Client:
    """A command, and a check of the files that it leaves behind."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=lambda: dict(OFFLINE))
    check: Callable[[], None] = lambda: None


def clients_of(url: str, folder: Path) -> Iterator[Client]:
    """Yield all clients."""
    python = str(FAST / "bin" / "python")
    yield Client("openai 2", [python, str(HERE / "openai_client.py"), url])
    newer = OFFLINE | {"PYTHONPATH": str(OPENAI_3)}
    yield Client("openai 3", [python, str(HERE / "openai_client.py"), url], newer)
    for name, environment in FRAMEWORKS.items():
        command = [str(ENVIRONMENTS / environment / "bin" / "python"), str(HERE / "agents_client.py"), url, name]
        yield Client(name, command, OFFLINE | {"OPENAI_API_KEY": "x"})
    yield lm_eval(url, folder)
    yield schemathesis(url)
    if vllm_cli.ENVIRONMENT.exists():
        yield vllm_bench(url, folder)
    else:
        print("left out: vllm bench serve, which comes with `make peers`")


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
    return Client("lm-eval", command, check=lambda: check_scores(out))


def check_scores(out: Path) -> None:
    """Raise unless the scores, the log likelihoods and the greedy flags are vLLM's.

    A log likelihood is a sum over up to 512 tokens in fp32, and word perplexity is the exponential
    of such a sum. Both are compared within 2 · 10⁻⁶ of their size, and all other scores to four
    decimals.
    """
    expected = json.loads((HERE / "lm_eval" / "expected.json").read_text())
    results = json.loads(only(out, "results_*.json").read_text())["results"]
    for task, scores in expected["scores"].items():
        for name, wanted in scores.items():
            value = results[task][f"{name},none"]
            assert abs(value - wanted) <= max(5e-5, 2e-6 * wanted), f"{task} {name} is {value} instead of {wanted}"
        rows = [json.loads(line) for line in only(out, f"samples_{task}_*.jsonl").read_text().splitlines()]
        samples = [[flat(response) for response in row["resps"]] for row in sorted(rows, key=lambda row: row["doc_id"])]
        assert samples_agree(samples, expected["samples"][task]), f"{task}: {samples}"


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
    command += ["--max-examples", "15", "--checks", "not_a_server_error"]
    hooks = {"PYTHONPATH": str(HERE), "SCHEMATHESIS_HOOKS": "schemathesis_hooks"}
    return Client("schemathesis", command, OFFLINE | hooks)


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
    return Client("vllm bench serve", command, variables, lambda: check_bench(folder / "vllm.json"))


def check_bench(path: Path) -> None:
    """Raise unless all requests have succeeded with the requested number of tokens."""
    record = json.loads(path.read_text())
    assert (record["completed"], record["failed"]) == (NUM_REQUESTS, 0)
    assert record["total_output_tokens"] == NUM_REQUESTS * OUTPUT_LEN


def works(client: Client, server: Server, folder: Path) -> bool:
    """Run a client; return whether its check passes and the server is healthy afterwards."""
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "200"} | client.environment
    try:
        options = {"env": environment, "cwd": folder, "timeout": SECONDS}
        done = subprocess.run(client.command, capture_output=True, text=True, **options)
        assert done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        client.check()
        assert server.client.get("/health").status_code == 200
    except (AssertionError, OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        print(f"\n{client.name}: {type(error).__name__}: {error}\n")
        return False
    return True


def random_requests(folder: Path) -> Client:
    """Return a short run of `benchmarks/differential.py`: no answer of ours may be a 5xx, and few may
    differ from vLLM's.
    """
    record = folder / "differences.json"
    script = HERE.parents[1] / "benchmarks" / "differential.py"
    command = [sys.executable, str(script), "--requests", str(RANDOM_REQUESTS), "--save", str(record)]

    def check() -> None:
        different = json.loads(record.read_text())
        assert len(different) <= MAX_DIFFERENT, [each["kinds"][0] for each in different]
        assert not any(each["status"] >= 500 for each in different)

    return Client("random requests beside vLLM", command, check=check)


def main() -> int:
    """Run every client against one server, and report which of them failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also send random requests to vLLM's server and to ours")
    full = parser.parse_args().full
    flags = ("--chat-template", str(CHAT_TEMPLATE), "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    flags += ("--enable-lora", "--runtime-lora-path", str(HERE.parent / "lora_adapters"))
    with tempfile.TemporaryDirectory() as name, running(*flags) as server:
        clients = [*clients_of(server.url, Path(name)), *([random_requests(Path(name))] if full else [])]
        results = {client.name: works(client, server, Path(name)) for client in clients}
    table("Clients", ("client", "as with vLLM"), [(name, "yes" if ok else "no") for name, ok in results.items()])
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
