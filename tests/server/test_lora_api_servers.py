"""Adapters with two API servers and two cores: what one server loads or unloads, the other has or has not at once."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import httpx
import pytest
from server.serving import Server, running
from server.test_data_parallel import API, processes_of
from server.test_lora import ADAPTERS, LOAD, PROMPT, UNLOAD

from minivllm.core.lora_request import LoRARequest
from minivllm.entrypoints.openai.adapter_table import AdapterTable
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.entrypoints.openai.protocol import LoadLoRAAdapterRequest
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.errors import MinivllmError

pytestmark = pytest.mark.usefixtures("warm_processes")
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


def put(table: AdapterTable, name: str) -> None:
    async def change() -> None:
        async with table.changing() as adapters:
            adapters.put(LoRARequest(name, 1, "p"), "p")

    asyncio.run(change())


def take(table: AdapterTable, name: str) -> None:
    async def change() -> None:
        async with table.changing() as adapters:
            adapters.pop(name)

    asyncio.run(change())


def test_a_change_is_seen_though_the_file_looks_as_it_did(tmp_path: Path):
    """As long, of the same time, and in time with the inode number of one that was there before."""
    path = tmp_path / "adapters"
    first, second = AdapterTable(path), AdapterTable(path)
    for number in range(40):
        put(first, f"{number:02}")
        os.utime(path, ns=(0, 0))
        assert second.now() == first.now()
        take(first, f"{number:02}")


def test_what_cannot_be_written_changes_nothing_on_any_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "adapters"
    first, second = AdapterTable(path), AdapterTable(path)
    put(first, "a")
    full = OSError(errno.ENOSPC, "No space left on device")
    for broken in ("write_bytes", "replace"):
        with monkeypatch.context() as disk:
            disk.setattr(Path if broken == "write_bytes" else os, broken, Mock(side_effect=full))
            for change in (lambda: put(first, "b"), lambda: take(first, "a")):
                with pytest.raises(RequestError, match=r"all API servers stay as they are.*No space left"):
                    change()
                assert list(first.now().by_name) == list(second.now().by_name) == ["a"]
    put(first, "b")
    assert list(second.now().by_name) == ["a", "b"]
    shutil.rmtree(tmp_path)
    with pytest.raises(RequestError, match="No such file"):
        put(first, "c")


def test_an_adapter_that_no_server_will_find_is_not_left_in_the_cores(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    class Engine:
        ids: ClassVar[set[int]] = set()
        failures: ClassVar[list[BaseException]] = []

        async def add_lora(self, adapter: LoRARequest) -> None:
            self.ids.add(adapter.lora_int_id)
            for failure in self.failures:
                raise failure

        async def remove_lora(self, lora_id: int) -> None:
            self.ids.remove(lora_id)

    engine: Any = Engine()
    models = OpenAIServingModels(["m"], "m", 64, engine, [str(folder)], AdapterTable(tmp_path / "adapters"))
    ask = LoadLoRAAdapterRequest(lora_name="x", lora_path=str(folder / "a"))
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(RequestError) as refused:
            asyncio.run(models.load_lora_adapter(ask))
    assert refused.value.status == 500
    assert engine.ids == set()
    for failure in (MinivllmError("refused"), RuntimeError("add_lora failed in one core"), asyncio.CancelledError()):
        engine.failures[:] = [failure]
        with pytest.raises(RequestError if isinstance(failure, MinivllmError) else type(failure)):
            asyncio.run(models.load_lora_adapter(ask))
        assert engine.ids == set()
    engine.failures.clear()
    asyncio.run(models.load_lora_adapter(ask))
    assert len(engine.ids) == 1


def test_a_damaged_table_is_logged_and_made_whole_by_the_next_change(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "adapters"
    first, second = AdapterTable(path), AdapterTable(path)
    put(first, "a")
    second.now()
    for damaged in (b"", b"\x00", b"\xff" * 9, path.read_bytes()[:-2]):
        caplog.clear()
        path.unlink()
        path.write_bytes(damaged)
        assert list(second.now().by_name) == list(first.now().by_name) == ["a"]
        second.now()
        assert sum("is damaged" in record.message for record in caplog.records) == 2, "once by each"
        put(first, "b")
        assert list(second.now().by_name) == ["a", "b"]
        take(first, "b")
        assert list(second.now().by_name) == ["a"]


def test_a_static_adapter_that_cannot_be_served_ends_all_servers_as_it_ends_one(folder: Path):
    flags = ("--api-server-count", "2", "--enable-lora", "--lora-modules", f"bad={folder}/dora")
    server = Server(flags, {"OMP_NUM_THREADS": "1"})
    try:
        assert server.process.wait(60) == 2
        assert server.said().count("use_dora is set") == server.said().count("An API server has ended") == 1
        assert "Traceback" not in server.said()
    finally:
        server.stop()
