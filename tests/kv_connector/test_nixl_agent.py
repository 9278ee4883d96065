"""The real NIXL refuses with readable errors; test_nixl_engines.py tests what it moves between two
processes.
"""

import pytest
from refusals import assert_refused

from minivllm.kv_connector.nixl import agent as nixl_agent
from minivllm.kv_connector.nixl.agent import NixlAgent


@pytest.fixture
def agent():
    agent = NixlAgent("this one")
    yield agent
    agent.close()
    agent.close()


@pytest.mark.nixl
def test_metadata_that_is_none_is_an_exception_and_nothing_worse(agent):
    for metadata in (b"", b"junk", bytes(1000)):
        with pytest.raises(Exception, match="NIXL"):
            agent.add_peer(metadata)


@pytest.mark.nixl
def test_ways_that_cannot_meet_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "posix")
    assert_refused("UCX_TLS is posix", NixlAgent, "another")


def test_without_nixl_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_module._api",))
    assert_refused("uv sync --group nixl", NixlAgent, "another")
