"""`minivllm chat`: a conversation with a server, which may be its own."""

import subprocess
import sys
from unittest.mock import Mock

import psutil
import pytest
from patience import PATIENCE, eventually
from server.serving import Server, free_port

from minivllm.entrypoints.cli import chat as cli
from minivllm.entrypoints.cli.main import main

SAYS = "def add(a, b):"


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Know the server's key, and return what goes with each request: short answers, always the same."""
    made = cli.Conversation.__init__
    options: dict[str, object] = {"max_tokens": 6, "temperature": 0}
    monkeypatch.setattr(cli.Conversation, "__init__", lambda *args, **more: made(*args, **more | options))
    monkeypatch.setenv("OPENAI_API_KEY", "first-key")
    return options


def types(monkeypatch: pytest.MonkeyPatch, *texts: str | type[BaseException]) -> None:
    """Let a user type these texts, or press Ctrl-C or Ctrl-D."""
    monkeypatch.setattr("builtins.input", Mock(side_effect=texts))


def answer(server: Server, *texts: str, system: str = "") -> str:
    """Return the server's answer to messages of the user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]
    instructions = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*instructions, *messages], "max_tokens": 6, "temperature": 0}
    return server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_a_message_is_answered_with_the_earlier_ones_in_mind(chat: Server, monkeypatch, capsys):
    types(monkeypatch, SAYS, " ", "x =", "/quit", AssertionError)
    assert main(["chat", "--url", f"{chat.url}/v1"]) == 0
    first = answer(chat, SAYS)
    assert capsys.readouterr().out.partition("\n")[2] == f"{first}\n{answer(chat, SAYS, first, 'x =')}\n"


def test_one_message(chat: Server, capsys):
    assert main(["chat", "--url", chat.url, "--model-name", "tiny-python", "-q", SAYS]) == 0
    assert capsys.readouterr() == (f"{answer(chat, SAYS)}\n", "")
    assert main(["chat", "--url", chat.url, "--system-prompt", "x = 1", "-q", SAYS]) == 0
    assert capsys.readouterr().out == f"{answer(chat, SAYS, system='x = 1')}\n"


@pytest.mark.parametrize("leaves", [EOFError, KeyboardInterrupt])
def test_the_prompt_can_be_left(chat: Server, monkeypatch, capsys, leaves):
    types(monkeypatch, leaves)
    assert main(["chat", "--url", chat.url]) == 0
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_an_answer_and_not_the_chat(chat: Server, monkeypatch, options):
    def interrupt(piece: str = "", end: str = "", flush: bool = False) -> None:
        if flush:
            raise KeyboardInterrupt

    types(monkeypatch, SAYS, "/quit")
    monkeypatch.setattr(cli, "print", interrupt, raising=False)
    options |= {"max_tokens": 480, "ignore_eos": True}
    before = chat.num_aborted()
    assert main(["chat", "--url", chat.url]) == 0
    assert eventually(lambda: chat.num_aborted() == before + 1)


def test_ctrl_c_while_a_server_starts_is_the_end(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_listens", Mock(side_effect=KeyboardInterrupt))
    assert main(["chat"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["--url", "no address"], "no address does not answer"),
        (["--api-key", "wrong"], "refuses with status 401"),
        (["--model-name", "nope"], "The model `nope` does not exist"),
    ],
)
def test_a_failure_is_one_line(chat: Server, capsys, flags, said):
    assert main(["chat", "--url", chat.url, "-q", "a", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_refused_message_is_forgotten(chat: Server, monkeypatch, capsys):
    types(monkeypatch, "x = 1\n" * 500, SAYS, "/quit")
    assert main(["chat", "--url", chat.url]) == 0
    shown = capsys.readouterr()
    assert "maximum context length" in shown.err
    assert shown.out.partition("\n")[2] == f"{answer(chat, SAYS)}\n"


@pytest.mark.usefixtures("warm_processes")
def test_where_no_server_is_it_starts_one_that_does_not_outlive_it():
    code = f"from minivllm.entrypoints.cli import chat; chat.DEFAULT_PORT = {free_port()}; chat.chat(chat.ChatArgs())"
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as chatting:
        assert chatting.stdin is not None
        assert chatting.stdout is not None
        chatting.stdin.write(f"{SAYS}\n")
        chatting.stdin.flush()
        said = chatting.stdout.readline() + chatting.stdout.readline()
        assert said.startswith("Write a message.")
        assert "> " in said
        servers = psutil.Process(chatting.pid).children(recursive=True)
        assert len(servers) >= 2
        chatting.kill()
    assert not psutil.wait_procs(servers, PATIENCE)[1]
