"""Ranks in stages of several: a rank that leaves is missed by its own stage, too."""

import pytest
from executor.group_member import Member

from minivllm.executor.multiproc_executor import rendezvous
from minivllm.executor.rank_processes import RankProcesses

pytestmark = pytest.mark.usefixtures("warm_processes")


def test_a_rank_that_leaves_is_missed_in_its_own_stage(request):
    store = rendezvous(4)
    ranks = RankProcesses(Member, ((store.host, store.port),), 4, 0)
    request.addfinalizer(ranks.shutdown)
    for _ in range(2):
        waiting = ranks.send("add_up", 3, join=list)
        assert waiting.result(30) == ["elsewhere", "elsewhere", "lost a peer", "left"]
        ranks.call("reset")
    assert ranks.call("add_up", -1) == ["added"] * 4
