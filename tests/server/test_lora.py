"""Adapters over HTTP: answers like vLLM's, and what its endpoints do with hostile paths.

`data/lora_exchanges.json` is what vLLM 0.32.0's CPU server answered, in this order; where it says
500 for an adapter that cannot be served, ours is a 400 (`ours`).
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import eventually
from refusals import assert_refused
from server.replay import differences
from server.serving import CHAT_TEMPLATE, Server, running

from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai import serving_models
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.errors import MinivllmError

pytestmark = pytest.mark.usefixtures("warm_processes")
ADAPTERS = Path(__file__).parents[1] / "lora_adapters"
EXCHANGES = json.loads((Path(__file__).parent / "data" / "lora_exchanges.json").read_text())
PROMPT = [516, 994, 8, 65, 12, 309, 288, 281, 386]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make the folder that the server may load from, and beside it one that it may not load from."""
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(ADAPTERS, root / "allowed")
    shutil.copytree(ADAPTERS / "c", root / "secret")
    (root / "allowed" / "empty").mkdir()
    return root / "allowed"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    adapters = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "16", "--max-cpu-loras", "3")
    names = ("--lora-modules", f"a={folder}/a", "--runtime-lora-path", str(folder))
    with running(*adapters, *names, "--chat-template", str(CHAT_TEMPLATE)) as started:
        yield started


def asked(server: Server, model: str, **settings) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    return server.client.post("/v1/completions", json=body | settings)


def names_of(server: Server) -> list[str]:
    return [card["id"] for card in server.client.get("/v1/models").json()["data"]]


def test_all_exchanges_in_order(server, folder):
    for entry in EXCHANGES:
        body = json.dumps(entry["body"]).replace("ADAPTERS", str(folder)) if entry["body"] else None
        reply = server.client.request(entry["method"], entry["path"], content=body, headers=JSON)
        kind = reply.headers.get("content-type", "")
        if entry["path"] == "/metrics":
            assert "# TYPE vllm:lora_requests_info gauge" in reply.text
            shown = [line for line in reply.text.splitlines() if line.startswith("vllm:lora_requests_info{")]
            assert len(shown) == 1, "only the adapters of now"
            assert shown[0].startswith('vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting')
        elif "ours" in entry:
            error = reply.json()["error"]
            assert (reply.status_code, error["type"], error["code"]) == (400, "InvalidUserInput", 400), entry["name"]
        elif not kind:
            assert (reply.status_code, reply.text) == (entry["status"], entry["response"]), entry["name"]
        else:
            assert not differences(entry, reply.status_code, kind, reply.text), entry["name"]
    adapter = server.client.get("/v1/models").json()["data"][1]
    assert (adapter["root"], adapter["parent"], adapter["max_model_len"]) == (f"{folder}/a", "tiny-python", None)


JSON = {"content-type": "application/json"}


def hostile_paths(folder: Path) -> dict[str, str]:
    """Make paths that lead to an adapter, or to nothing, and must not be followed."""
    secret, links = folder.parent / "secret", folder / "links"
    for name in ("config_out", "weights_out", "pipe"):
        (links / name).mkdir(parents=True)
    for name, target in (
        ("out", secret), ("round", links / "round"), ("up", folder.parent),
        ("config_out/adapter_config.json", secret / "adapter_config.json"),
        ("weights_out/adapter_model.safetensors", secret / "adapter_model.safetensors"),
    ):  # fmt: skip
        (links / name).symlink_to(target)
    shutil.copy(ADAPTERS / "c" / "adapter_model.safetensors", links / "config_out")
    shutil.copy(ADAPTERS / "c" / "adapter_config.json", links / "weights_out")
    os.mkfifo(links / "pipe" / "adapter_config.json")
    return {
        "absolute": str(secret), "up": f"{folder}/../secret", "relative": os.path.relpath(secret),
        "encoded": f"{folder}/%2e%2e/secret", "backslashes": f"{folder}\\..\\secret",
        "a link out": str(links / "out"), "through a link": str(links / "up" / "secret"),
        "a link in circles": str(links / "round"), "its config is a link out": str(links / "config_out"),
        "its weights are a link out": str(links / "weights_out"), "a pipe": str(links / "pipe"),
        "NUL": f"{folder}/a\0/../../secret", "very long": f"{folder}/" + "a" * 5000,
        "very deep": f"{folder}/" + "../" * 20000 + "etc",
        "a prefix of the folder's name": f"{folder}{'/' * 3}../secret", "a file": f"{folder}/a/adapter_config.json",
        "the root": "/", "a home": "~/secret", "half a character": f"{folder}/\ud800", "a url": f"file://{secret}",
        "the hub": "someone/adapter",
    }  # fmt: skip


def test_no_path_leads_out(server, folder):
    """Every path gets the same answer, so that a client cannot find out what exists on the machine."""
    before = names_of(server)
    for name, path in (hostile_paths(folder) | {"nothing": f"{folder}/nothing"}).items():
        body = json.dumps({"lora_name": "x", "lora_path": path})
        error = server.client.post(LOAD, content=body, headers=JSON).json()["error"]
        shown = path[:200].encode("utf8", "backslashreplace").decode()
        message = f"Loading lora x failed: No adapter found for {shown}"
        assert error == {"message": message, "type": "NotFoundError", "param": None, "code": 404}, name
    assert names_of(server) == before
    assert asked(server, "a").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        "{", "[]", "{}", '{"lora_name": ["x"], "lora_path": "y"}', '{"lora_name": null, "lora_path": null}',
        '{"lora_name": "x", "lora_path": {"a": 1}}', '{"lora_name": "x\\ny", "lora_path": "y"}',
        '{"lora_name": "\\ud800", "lora_path": "y"}', '{"lora_name": " ", "lora_path": "y"}',
        json.dumps({"lora_name": "x" * 257, "lora_path": "y"}),
        '{"lora_name": "x", "lora_path": "y", "load_inplace": 7}',
    ],
)  # fmt: skip
def test_a_hostile_body_is_the_clients_fault(server, body):
    reply = server.client.post(LOAD, content=body, headers=JSON)
    assert reply.status_code == 400, reply.text
    assert server.client.post(LOAD, content=body, headers={"content-type": "text/plain"}).status_code == 400
    assert server.client.post(UNLOAD, content=body, headers=JSON).status_code in (400, 404)


def test_an_adapter_that_is_unloaded_while_in_use_serves_its_requests(server, folder):
    leaving = folder / "leaving"
    shutil.copytree(ADAPTERS / "b", leaving)
    assert server.client.post(LOAD, json={"lora_name": "leaving", "lora_path": str(leaving)}).status_code == 200
    wanted = asked(server, "leaving", max_tokens=100, ignore_eos=True).json()["choices"][0]["text"]
    body = {"model": "leaving", "prompt": PROMPT, "temperature": 0, "max_tokens": 100, "stream": True}
    text = ""
    with server.client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
        for number, line in enumerate(line for line in stream.iter_lines() if line.startswith("data: {")):
            if number == 0:
                assert 'running_lora_adapters="leaving"' in server.client.get("/metrics").text
                reply = server.client.post(UNLOAD, json={"lora_name": "leaving"})
                assert reply.status_code == 200
                assert asked(server, "leaving").status_code == 404
                shutil.rmtree(leaving)
            text += json.loads(line[len("data: ") :])["choices"][0]["text"]
    assert text == wanted
    assert eventually(lambda: 'running_lora_adapters=""' in server.client.get("/metrics").text)


def test_without_the_flag_there_are_no_routes_and_no_adapters(base):
    for path in (LOAD, UNLOAD):
        assert base.client.post(path, json={"lora_name": "a", "lora_path": "a"}).status_code == 404
        assert path not in base.client.get("/openapi.json").json()["paths"]
    assert asked(base, "a").status_code == 404
    assert "lora_requests_info" not in base.client.get("/metrics").text


def test_modules_are_given_as_name_and_path():
    assert serving_models.lora_modules_of(["a=x/y=z", "b=p"]) == {"a": "x/y=z", "b": "p"}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["a"], "name=path"), (["=x"], "name=path"), (["a="], "name=path"), (["a\n=x"], "printable"),
        (["a=x", "a=y"], "two adapters named 'a'"),
    ],
)  # fmt: skip
def test_wrong_modules_are_refused(modules, message):
    assert_refused(message, serving_models.lora_modules_of, modules)


@pytest.mark.parametrize(
    ("engine", "frontend", "message"),
    [
        ({}, {"lora_modules": ["a=b"]}, "--enable-lora"),
        ({}, {"runtime_lora_path": ["."]}, "--enable-lora"),
        ({"enable_lora": True}, {"runtime_lora_path": ["nothing/here"]}, "not a folder"),
    ],
)
def test_flags_that_do_not_go_together(engine, frontend, message):
    assert_refused(message, serving_models.check_lora_settings, EngineArgs(**engine), FrontendArgs(**frontend))


def test_a_static_adapter_that_cannot_be_served_ends_the_server():
    server = Server(("--enable-lora", "--lora-modules", f"bad={ADAPTERS}/dora"), {"OMP_NUM_THREADS": "1"})
    try:
        assert server.process.wait(60) == 2
        assert server.said().count("has use_dora 'True'") == 1
        assert "Traceback" not in server.said()
    finally:
        server.stop()


class Engine:
    """An engine that has adapters, and fails when told to."""

    engine_args = EngineArgs(model="m")

    def __init__(self, *failures: BaseException) -> None:
        self.ids: set[int] = set()
        self.failures = list(failures)

    async def add_lora(self, adapter: LoRARequest) -> None:
        self.ids.add(adapter.lora_int_id)
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop()

    async def remove_lora(self, lora_id: int) -> None:
        self.ids.remove(lora_id)


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (MinivllmError("refused"), RequestError),
        (RuntimeError("add_lora failed in one core"), RuntimeError),
        (asyncio.CancelledError(), asyncio.CancelledError),
    ],
)
def test_an_adapter_that_no_request_will_find_is_not_left_in_the_cores(failure, shown):
    engine: Any = Engine(failure)
    models = OpenAIServingModels(engine, FrontendArgs(runtime_lora_path=[str(ADAPTERS)]))
    ask = LoadLoRAAdapterRequest(lora_name="x", lora_path=str(ADAPTERS / "a"))
    with pytest.raises(shown):
        asyncio.run(models.load_lora_adapter(ask))
    assert engine.ids == set()
    asyncio.run(models.load_lora_adapter(ask))
    assert len(engine.ids) == 1


def test_of_two_that_want_the_same_name_at_once_one_gets_it():
    engine: Any = Engine()
    models = OpenAIServingModels(engine, FrontendArgs(runtime_lora_path=[str(ADAPTERS)]))
    asks = [LoadLoRAAdapterRequest(lora_name="x", lora_path=str(ADAPTERS / name)) for name in "ab"]

    async def load_both() -> list[Any]:
        return await asyncio.gather(*map(models.load_lora_adapter, asks), return_exceptions=True)

    done, refused = asyncio.run(load_both())
    assert "added successfully" in done
    assert "already loaded" in str(refused)
    assert len(engine.ids) == 1


def test_a_folder_may_be_a_link_itself(tmp_path):
    """The owner of the allowed folder chose to make it a link."""
    real, link = tmp_path / "real", tmp_path / "link"
    shutil.copytree(ADAPTERS / "c", real / "c")
    link.symlink_to(real)

    def found(folder: Path, *allowed: Path) -> str | None:
        return serving_models.adapter_folder(str(folder / "c"), [*map(str, allowed)])

    assert found(link, link) == found(real, tmp_path / "gone", real) == str((real / "c").resolve())
    assert found(real, tmp_path / "other") is None
