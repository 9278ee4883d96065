"""Several connectors as one: what each counts is there."""

from dataclasses import replace
from pathlib import Path

import pytest
from kv_connector.nixl_doubles import CONFIG

from minivllm.config import KVTransferConfig
from minivllm.core.kv_connector import KVConnectorRole
from minivllm.kv_connector.example_connector import ExampleConnector
from minivllm.kv_connector.multi_connector import MultiConnector


def test_the_counts_of_two_connectors_of_one_kind_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counted = iter([{"bytes": 3, "seconds": [0.5], "reads": 1}, {"bytes": 4, "seconds": [0.25]}, None, None])
    monkeypatch.setattr(ExampleConnector, "get_kv_connector_stats", lambda self: next(counted))
    one = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    settings = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [one, one]})
    both = MultiConnector(replace(CONFIG, kv_transfer_config=settings), KVConnectorRole.WORKER)
    assert both.get_kv_connector_stats() == {"bytes": 7, "seconds": [0.5, 0.25], "reads": 1}
    assert both.get_kv_connector_stats() is None
