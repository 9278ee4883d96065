"""Links that carry keys and values, and the part of a transfer that remains once the prompt is
computed. *Modelled*.

    for link in LINKS.values(): print(link.name, Transfer.of(model, gpu, 2048, link).seconds)

A transfer takes prompt tokens × bytes per token / bandwidth. Both the transfer and the prefill take
longer for a longer prompt, so whether a link hides the transfer depends on the model and the GPU,
and hardly on the prompt's length.
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.memory import kv_bytes_per_token
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.layouts import Layout, PlacedModel

GIGABIT = 1e9 / 8


class Link(NamedTuple):
    """A link from one GPU's memory to another's: bytes per second in one direction, and seconds
    before the first byte.
    """

    name: str
    bandwidth: float
    latency: float
    source: str

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds until all bytes have arrived."""
        return self.latency + num_bytes / self.bandwidth


_NETWORK = "line rate; latency assumed"
_SHEET = "data sheet, one direction; latency assumed"
_HERE = "NIXL on this project's build machine, 500 blocks of 64 KiB; latency assumed"
LINKS = {
    link.name: link
    for link in (
        Link("NVLink 4", 450e9, 2e-5, f"{_SHEET} (H100, H200)"),
        Link("NVLink 3", 300e9, 2e-5, f"{_SHEET} (A100)"),
        Link("PCIe 5", 50e9, 2e-5, "about what copies reach on 16 lanes; latency assumed"),
        Link("PCIe 4", 25e9, 2e-5, "about what copies reach on 16 lanes; latency assumed"),
        Link("400 Gb/s", 400 * GIGABIT, 1e-4, _NETWORK),
        Link("200 Gb/s", 200 * GIGABIT, 1e-4, _NETWORK),
        Link("100 Gb/s", 100 * GIGABIT, 1e-4, _NETWORK),
        Link("25 Gb/s", 25 * GIGABIT, 1e-4, _NETWORK),
        Link("10 Gb/s", 10 * GIGABIT, 1e-4, _NETWORK),
        Link("shared memory", 1.9e9, 1e-4, f"{_HERE}, UCX over sm: 1.9 to 2.0 GB/s"),
        Link("loopback", 0.66e9, 1e-4, f"{_HERE}, UCX over tcp: 0.66 GB/s"),
    )
}


def get_link(name: str) -> Link:
    """Return the link with this name.

    Raises:
        MinivllmError: there is no such link; the message lists the known ones.
    """
    require(name in LINKS, f"unknown link {name!r}: use one of {', '.join(LINKS)}")
    return LINKS[name]


class Transfer(NamedTuple):
    """The transfer of one prompt's keys and values from the prefill GPU to the decode GPU."""

    tokens: int
    num_bytes: int
    layers: int
    seconds: float
    """From the first byte to the last."""
    prefill: float
    """Seconds that the prompt takes to compute, alone on its GPU."""

    @classmethod
    def of(cls, model: ModelConfig, gpu: Hardware, tokens: int, link: Link, tp: int = 1) -> Transfer:
        """Return the transfer of a prompt of `tokens` tokens, computed by `tp` GPUs, all of which
        send through one link.

        Raises:
            UnsupportedModelError: layers that do not keep every token.
            MinivllmError: the heads cannot be divided over `tp` GPUs.
        """
        num_bytes = tokens * kv_bytes_per_token(model)
        cost = PlacedModel(model, gpu, Layout(tp, 1, 1)).cost
        prefill = cost.seconds(StepShape.of([(tokens, 0)]))
        return cls(tokens, num_bytes, model.num_hidden_layers, link.seconds(num_bytes), prefill)

    @property
    def exposed(self) -> float:
        """Seconds that the transfer adds where each layer is sent as soon as it is computed."""
        return layer_wise_end(0.0, self.prefill, self.seconds, self.layers) - self.prefill


def layer_wise_end(start: float, end: float, seconds: float, layers: int) -> float:
    """Return the arrival time of the last layer, for a prefill from `start` to `end` whose layers
    are sent one after the other.

    A layer can be sent once it is computed and the previous layer has been sent.
    """
    return max(end + seconds / layers, start + (end - start) / layers + seconds)


def least_bandwidth(model: ModelConfig, tokens: int, prefill: float) -> float:
    """Return the bytes per second at which sending a prompt's keys and values takes as long as
    computing the prompt.
    """
    return tokens * kv_bytes_per_token(model) / prefill
