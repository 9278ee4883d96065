"""Adapters with two API servers and two cores: what one server loads or unloads, the other has or has not at once."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.serving import Server, running
from server.test_data_parallel import API, processes_of
from server.test_lora import ADAPTERS, LOAD, PROMPT, UNLOAD

from minivllm.core.lora_request import LoRARequest
from minivllm.entrypoints.openai.adapter_table import AdapterTable

WANTED = {
    "tiny-python": [289, 465, 309, 199, 199, 516, 415, 1071],
    "a": [289, 199, 199, 516, 309, 8, 66, 12],
    "b": [409, 65, 61, 281, 379, 289, 326, 309],
    "c": [309, 199, 199, 3, 3, 3, 3, 3],
}
"""What PEFT and vLLM compute with these adapters."""
FLAGS = ("--data-parallel-size", "2", "--api-server-count", "2", "--enable-lora", "--max-loras", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "allowed"
    shutil.copytree(ADAPTERS, folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    names = ("--lora-modules", f"a={folder}/a", f"b={folder}/b", "--runtime-lora-path", str(folder))
    with running(*FLAGS, *names, env={"OMP_NUM_THREADS": "1"}) as one:
        yield one


@pytest.fixture(scope="module")
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """A kept connection to each API server."""
    found: dict[int, httpx.Client] = {}
    processes = processes_of(server, API)
    while len(found) < 2:
        client = httpx.Client(base_url=server.url, timeout=60)
        reply = client.get("/version")
        port = reply.extensions["network_stream"].get_extra_info("client_addr")[1]
        (pid,) = [
            one.pid
            for one in processes
            if any(held.raddr and held.raddr.port == port for held in one.net_connections("tcp"))
        ]
        if found.setdefault(pid, client) is not client:
            client.close()
    yield list(found.values())
    for client in found.values():
        client.close()


def tokens(client: httpx.Client, model: str, rank: int) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    reply = client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["token_ids"]


def shown(client: httpx.Client) -> list[tuple[str, str, str | None]]:
    return [(card["id"], card["root"], card["parent"]) for card in client.get("/v1/models").json()["data"]]


def names(client: httpx.Client) -> list[str]:
    return [name for name, _, _ in shown(client)]


def load(client: httpx.Client, name: str, path: Path, **more: bool) -> int:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **more}).status_code


def unload(client: httpx.Client, name: str) -> int:
    return client.post(UNLOAD, json={"lora_name": name}).status_code


def test_static_adapters_are_the_same_on_all_servers_and_cores(clients):
    for client in clients:
        assert names(client) == ["tiny-python", "a", "b"]
        for rank in (0, 1):
            assert {name: tokens(client, name, rank) for name in ("tiny-python", "a", "b")} == {
                name: WANTED[name] for name in ("tiny-python", "a", "b")
            }
    assert shown(clients[0]) == shown(clients[1])


def test_what_one_server_loads_and_unloads_all_have_and_have_not(clients, folder):
    for one, other in (clients, clients[::-1]):
        assert load(one, "c", folder / "c") == 200
        assert shown(one) == shown(other)
        assert tokens(other, "c", 0) == tokens(one, "c", 1) == WANTED["c"]
        assert load(other, "c", folder / "b") == 400, "the name is taken"
        assert load(other, "c", folder / "b", load_inplace=True) == 200
        assert tokens(one, "c", 1) == tokens(other, "c", 0) == WANTED["b"]
        assert unload(other, "c") == 200
        assert unload(one, "c") == 404
        for client in (one, other):
            assert names(client) == ["tiny-python", "a", "b"]
            assert client.post("/v1/completions", json={"model": "c", "prompt": "x"}).status_code == 404


def test_a_static_adapter_can_be_unloaded_on_either(clients, folder):
    assert unload(clients[1], "b") == 200
    assert names(clients[0]) == ["tiny-python", "a"]
    assert load(clients[0], "b", folder / "b") == 200
    assert tokens(clients[1], "b", 0) == WANTED["b"]


def test_servers_that_load_at_once_load_one_after_the_other(clients, folder):
    """Of two that want the same name one gets it; of others none is lost."""
    answers: list[tuple[str, int]] = []

    def ask(client: httpx.Client, own: str) -> None:
        for name in ("both", own, f"{own}2"):
            answers.append((name, load(client, name, folder / "c")))

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(clients, ("one", "other"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [
        ("both", 200), ("both", 400), ("one", 200), ("one2", 200), ("other", 200), ("other2", 200),
    ]  # fmt: skip
    assert shown(clients[0]) == shown(clients[1])
    assert {"both", "one", "one2", "other", "other2"} < set(names(clients[0]))
    for index, name in enumerate(("other2", "one2")):
        assert tokens(clients[index], name, index) == WANTED["c"]


def test_what_is_refused_is_refused_on_all(clients, folder):
    before = shown(clients[0])
    assert load(clients[0], "bad", folder / "dora") == 400
    assert load(clients[1], "bad", folder.parent) == 404
    assert shown(clients[0]) == shown(clients[1]) == before


def test_one_server_changes_a_table_at_a_time_and_no_id_is_given_twice(tmp_path: Path):
    """Not by one that fails meanwhile, either."""
    path = tmp_path / "adapters"
    first, second = AdapterTable(path), AdapterTable(path)

    async def work() -> None:
        async with first.changing() as adapters:
            adapters.put(LoRARequest("a", adapters.next_id(), "p"), "p")
            assert second.now().by_name == {}
        assert second.now() == first.now()
        with pytest.raises(ZeroDivisionError):
            await failing(second)
        async with first.changing() as adapters:
            assert adapters.next_id() == 3
            waiting = asyncio.create_task(changed(second))
            await asyncio.sleep(0.1)
            assert not waiting.done(), "one after the other"
        assert await waiting == 4
        assert list(first.now().by_name) == ["a", "later"]

    async def failing(table: AdapterTable) -> None:
        async with table.changing() as adapters:
            assert adapters.next_id() == 2
            raise ZeroDivisionError

    async def changed(table: AdapterTable) -> int:
        async with table.changing() as adapters:
            adapters.put(LoRARequest("later", adapters.next_id(), "p"), "p")
            return adapters.last_id

    asyncio.run(work())
