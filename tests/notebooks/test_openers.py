"""Test the places where people open the notebooks: Colab, a development container, and JupyterLab
with our settings. `e2e/test_notebooks.py` looks at what `make lab` shows.
"""

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import colab
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from jupyter_server.services.kernels.websocket import KernelWebsocketHandler
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from repository import ROOT
from traitlets.config.loader import PyFileConfigLoader

TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
SETTINGS = ROOT / ".jupyter" / "jupyter_lab_config.py"


def test_the_container_runs_commands_that_exist():
    assert [name for name in CONTAINER if name.endswith("Command")] == ["onCreateCommand"]
    make, target = CONTAINER["onCreateCommand"].split()
    assert make == "make"
    assert target in TARGETS


def test_the_container_has_a_python_that_the_course_runs_on_and_opens_the_notebooks():
    (wanted,) = re.findall(r"/python:(\d+\.\d+)$", CONTAINER["image"])
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert SpecifierSet(asked).contains(wanted)
    config = (ROOT / "Makefile").read_text() + SETTINGS.read_text()
    assert not re.search(r"ServerApp\.port|\"port\"", config)
    opened = CONTAINER["customizations"]["codespaces"]["openFiles"]
    assert all((ROOT / name).is_file() for name in opened)


def test_in_colab_only_what_is_missing_is_installed(monkeypatch):
    versions = {"numpy": "2.0.2", "ipywidgets": "7.7.1", "transformers": "4.57.0", "triton": "3.6.0"}

    def version_there(name):
        if name in versions:
            return versions[name]
        raise PackageNotFoundError(name)

    monkeypatch.setattr(colab, "version", version_there)
    names = {Requirement(text).name for text in colab.wanting()}
    assert {"transformers", "anywidget", "msgspec"} <= names
    assert names.isdisjoint({"numpy", "jupyterlab", "ipywidgets", "triton"})
    monkeypatch.setattr(colab, "version", version)
    assert colab.wanting() == [], "this Python has all"


def test_colab_installs_then_goes_to_the_notebooks(monkeypatch):
    ran, places = [], []
    monkeypatch.setattr(colab, "wanting", lambda: ["anywidget>=0.9"])
    monkeypatch.setattr(colab, "find_spec", lambda name: None)
    monkeypatch.setattr(colab.subprocess, "run", lambda words, check: ran.append(words[3:]))
    monkeypatch.setattr(colab.os, "chdir", places.append)
    colab.main()
    editable = ["install", "--quiet", "--no-deps", "--editable", str(ROOT)]
    assert ran == [["install", "--quiet", "anywidget>=0.9"], editable]
    assert places == [ROOT / "notebooks"]
    ran.clear()
    monkeypatch.setattr(colab, "wanting", list)
    monkeypatch.setattr(colab, "find_spec", lambda name: object())
    colab.main()
    assert ran == [], "after a restart of the session all is there"


def test_messages_of_a_kernel_do_not_wait_for_an_acknowledgement(monkeypatch):
    """The websocket is told to send each message immediately, before it joins the kernel's
    channels.
    """
    settings = PyFileConfigLoader(SETTINGS.name, str(SETTINGS.parent)).load_config()
    connection_class = settings.ServerApp.kernel_websocket_connection_class
    done: list[object] = []
    handler = KernelWebsocketHandler.__new__(KernelWebsocketHandler)
    monkeypatch.setattr(handler, "set_nodelay", done.append)
    monkeypatch.setattr(ZMQChannelsWebsocketConnection, "connect", lambda self: done.append("connect"))
    connection = connection_class.__new__(connection_class)
    connection.websocket_handler = handler
    connection.connect()
    assert done == [True, "connect"]
