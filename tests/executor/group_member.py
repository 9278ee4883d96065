"""A rank with a process group and nothing else, in two stages of two."""

from types import SimpleNamespace

import torch

from minivllm.models.parallel import LostPeerError
from minivllm.worker.worker import join_group

LAYOUT = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2, world_size=4, device="cpu", num_threads=4)


class Member:
    """A rank with a process group and nothing else."""

    def __init__(self, address: tuple[str, int], rank: int) -> None:
        self.rank, self.group = rank, join_group(LAYOUT, address, rank)

    def reset(self) -> None:
        self.group.rejoin()

    def leave_group(self) -> None:
        self.group.leave()

    def add_up(self, leaver: int) -> str:
        """Sum over the stage while one rank leaves; return what this rank noticed."""
        if self.rank == leaver:
            self.group.leave()
            return "left"
        if leaver >= 0 and self.rank // 2 != leaver // 2:
            return "elsewhere"
        try:
            self.group.all_reduce(torch.ones(3))
        except LostPeerError:
            return "lost a peer"
        return "added"
