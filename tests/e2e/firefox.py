"""Find Firefox on this machine, and drive it by WebDriver BiDi.

Playwright's own client for that protocol needs a newer Firefox than Debian's, so this is a small
one. A proxy refuses and notes every request to another host.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

from e2e.chromium import find_program
from patience import eventually

HOW_TO_GET_IT = "apt-get install firefox-esr, or name one in FIREFOX=PATH"
REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
KEYS = {"Enter": "\ue007", "Control": "\ue009", "ArrowLeft": "\ue012", "ArrowRight": "\ue014"}
MAKER = ("mozilla.com:443", "mozilla.org:443", "mozilla.net:443")
"""Firefox asks these for news of itself, whatever its page does."""
FIELD = """(text) => {
  const [before, field] = [document.activeElement, document.createElement("textarea")];
  field.value = text;
  document.body.append(field);
  field.select();
  window.field = { leave: () => (field.remove(), before.focus()) };
}"""
SECONDS = 120
"""The longest that Firefox may take for one command."""


def find_firefox() -> str | None:
    """Return Firefox's path, or None."""
    return find_program("FIREFOX", ("firefox-esr", "firefox"))


class Outside(ThreadingTCPServer):
    """An HTTP proxy that refuses everything and keeps the addresses, except its maker's."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Refusal)
        self.asked: list[str] = []


class Refusal(StreamRequestHandler):
    """The answer to one request of an `Outside`."""

    server: Outside

    def handle(self) -> None:
        _, address, *_ = self.rfile.readline().decode(errors="replace").split()  # "CONNECT example.com:443 HTTP/1.1"
        if not address.endswith(MAKER):
            self.server.asked.append(address)
        self.wfile.write(REFUSED)


class Tab:
    """A page of Firefox. It keeps the errors of its console and the requests to other hosts."""

    def __init__(self, socket: Any, proxy: Outside) -> None:
        self._socket = socket
        self._sent = 0
        self.asked = proxy.asked
        self.errors: list[str] = []
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded"])
        self._context = self.send("browsingContext.create", type="tab")["context"]

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; keep the errors that are told meanwhile."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message["type"] == "event":
                self._note(message["params"])
            elif message["id"] == self._sent:
                assert message["type"] == "success", f"{method}: {message['message']}"
                return message["result"]

    def _note(self, entry: dict[str, Any]) -> None:
        if entry.get("level") == "error":
            self.errors.append(f"{entry['text']} ({entry['source'].get('context')})")

    def open(self, address: str) -> None:
        self.send("browsingContext.navigate", context=self._context, url=address, wait="complete")

    def evaluate(self, function: str, *arguments: Any) -> Any:
        """Call a JavaScript function with these arguments, wait for its promise, and return the
        value.
        """
        call = f"(async () => JSON.stringify(await ({function})(...{json.dumps(arguments)})) ?? 'null')()"
        target = {"context": self._context}
        answer = self.send("script.evaluate", expression=call, target=target, awaitPromise=True)
        assert answer["type"] == "success", answer["exceptionDetails"]["text"]
        return json.loads(answer["result"]["value"])

    def reaches(self, condition: str, *arguments: Any) -> bool:
        """Return whether a JavaScript function returns something true before a minute has passed."""
        return eventually(lambda: self.evaluate(condition, *arguments))

    def paste(self, text: str) -> None:
        """Cut a text from a field and paste it over all that the focused element has: a script may
        not put text on the clipboard.
        """
        self.evaluate(FIELD, text)
        self.press("Control", "x")
        self.evaluate("() => window.field.leave()")
        self.press("Control", "a")
        self.press("Control", "v")

    def press(self, *keys: str) -> None:
        """Press these keys together."""
        values = [KEYS.get(key, key) for key in keys]
        actions = [{"type": "keyDown", "value": value} for value in values]
        actions += [{"type": "keyUp", "value": value} for value in reversed(values)]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self.send("input.performActions", context=self._context, actions=[keyboard])


@contextmanager
def outside() -> Iterator[Outside]:
    """Run the proxy."""
    with Outside() as proxy:
        thread = Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


@contextmanager
def firefox(executable: str, profile: Path) -> Iterator[Tab]:
    """Start a headless Firefox, with its files in `profile`, and open a page.

    It reaches this machine directly and all other hosts through the proxy, workers included.
    """
    from websocket import create_connection

    with outside() as proxy, (profile / "firefox.log").open("w") as log:
        (profile / "user.js").write_text("\n".join(_preferences(proxy.server_address[1])))
        command = [executable, "--headless", "--no-remote", "--remote-debugging-port=0", "--profile", str(profile)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"ws://127.0.0.1:{_port(profile)}/session"
            with closing(create_connection(address, timeout=SECONDS, suppress_origin=True)) as socket:
                tab = Tab(socket, proxy)
                yield tab
                tab.send("browser.close")
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()


def _preferences(proxy_port: int) -> Sequence[str]:
    own = {f"network.proxy.{scheme}": "127.0.0.1" for scheme in ("http", "ssl")}
    own |= {f"network.proxy.{scheme}_port": proxy_port for scheme in ("http", "ssl")}
    own |= {"network.proxy.type": 1, "media.gmp-manager.updateEnabled": False}
    return [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in own.items()]


def _port(profile: Path) -> int:
    """Return the port that Firefox listens on, which it writes into its profile."""
    file = profile / "WebDriverBiDiServer.json"
    assert eventually(file.exists), (profile / "firefox.log").read_text()[-3000:]
    return json.loads(file.read_text())["ws_port"]
