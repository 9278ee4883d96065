"""Lesson 10's chats, its budgets by data sheet, its figure and its command line; the kernel's part is
in `kernel_cases`, what the pieces cost in `pieces`.

A function `measure_*` or `show_*` prints its table and returns its figures; the callables that it
takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.config import Parts
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.engines.disturbed_chats import CHATS, LONG, MAX_MODEL_LEN, disturb, latencies
from minivllm_lab.lesson import LessonCode
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, panels
from minivllm_lab.progress import track
from minivllm_lab.tables import Timed, closing, console, record_table
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import num_parameters
from minivllm_simulate.published import SARATHI, SARATHI_DECODES, SARATHI_STEP, sarathi_step

Steps = Sequence[Mapping[str, int]]


# ---- 1 and 2. what a step is made of -------------------------------------------------------------


def show_steps(policies: Mapping[str, Steps]) -> dict[str, list[dict[str, int]]]:
    """Print each policy's steps as strips, with the request's letter for each token."""
    for name, steps in policies.items():
        sizes = [sum(step.values()) for step in steps]
        console.print(f"{name}: {len(steps)} steps, of {min(sizes)} to {max(sizes)} tokens")
        for number, step in enumerate(steps, start=1):
            console.print(f"  {number:2}  {''.join(name * tokens for name, tokens in step.items())}", markup=False)
    return {name: [dict(step) for step in steps] for name, steps in policies.items()}


# ---- 3. chats and long prompts in the engine -----------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "prefill first (V0)": {
        "parts": Parts(policy=PREFILL_FIRST),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": MAX_MODEL_LEN,
    },
    **{f"mixed, {budget} a step": {"max_num_batched_tokens": budget} for budget in (2048, 512, 128, 32)},
}
QUICK_WAYS = "prefill first (V0)", "mixed, 2048 a step", "mixed, 512 a step", "mixed, 32 a step"


def measure_chats(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure, for each policy, the chats' token gaps while long prompts arrive, and the prompts'
    time to first token.
    """
    records, prompts = {}, 1 if arguments.quick else 4
    for name in track(QUICK_WAYS if arguments.quick else tuple(WAYS), "disturbing"):
        run = disturb(arguments, prompts, **WAYS[name])
        with_prompt = [step for step in run.scheduled if LONG in step]
        records[name] = {
            **latencies(run.gaps, run.firsts),
            "steps": len(with_prompt) / prompts,
            "chat_tokens": sum(sum(step.values()) - step[LONG] for step in with_prompt) / len(with_prompt),
        }
    record_table(
        f"{CHATS} chats, and {prompts} prompt{'s' * (prompts > 1)} of {arguments.prompt:,} tokens, one after another; "
        "ms",
        records,
        "{name} | longest gap {itl_max_ms:,.1f} | TTFT {ttft_ms:,.1f} | steps {steps:.0f} | decodes {chat_tokens:.0f}",
        "The gap is a chat's, TTFT and steps a long prompt's; decodes: chats' tokens in each of its steps.",
    )
    return records


# ---- 6. how many tokens are free, by data sheets --------------------------------------------------

GPUS = ("L4", "A100-80", "H100", "H200", "B200")
GPU_MODEL, GAP = "Llama-3.1-8B", 0.05


def show_gpus(knee: LessonCode, budget_for: LessonCode) -> dict[str, Any]:
    """Show each GPU's knee from its data sheet, the modelled budget for a gap of 50 ms, and the
    model's error.
    """
    model, records = known_model(GPU_MODEL), {}
    parameters = num_parameters(model) - model.vocab_size * model.hidden_size
    for name in GPUS:
        gpu, cost = get_hardware(name), RooflineCost.of(model, get_hardware(name))
        flops, bandwidth = gpu.flops_of("bfloat16"), gpu.bandwidth
        rates = cost.arithmetic_efficiency * flops, cost.memory_efficiency * bandwidth
        records[name] = {
            "knee": knee(flops, bandwidth, 2),
            "int4": knee(flops, bandwidth, 0.5),
            "least_ms": 1e3 * cost.seconds(StepShape.of([(1, 0)])),
            "budget": budget_for(GAP - cost.step_overhead, parameters, 2, *rates),
        }
    record_table(
        f"\nFree tokens, by data sheets; {GPU_MODEL} in bfloat16, modelled",
        records,
        "GPU {name} | knee {knee:.0f} | knee, 4 bits {int4:.0f} | ms of a decode {least_ms:.1f} | "
        f"budget for {1e3 * GAP:.0f} ms {{budget:,}}",
    )
    return {"gpus": records, "sarathi": _sarathi()}


def _sarathi() -> dict[str, float]:
    """Compare the model with the longest gaps that Sarathi-Serve's authors published for their
    budget.
    """
    errors = {name: sarathi_step(context) / published - 1 for name, (context, published) in SARATHI.items()}
    longer = " and ".join(f"{error:.0%}" for error in errors.values())
    console.print(
        f"How good is the model? Sarathi-Serve's authors ran Yi-34B on two A100, {SARATHI_STEP:,} tokens a step: "
        f"99% of the gaps are within 0.14 s (chats) and 0.17 s (long documents). For a step with {SARATHI_DECODES} "
        f"decodes of such lengths our model says {longer} more."
    )
    return errors


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    first, *_, small = figures["chats"].values()
    knee = figures["knee"]
    closing(
        Timed(
            f"A long prompt stalled the chats for {first['itl_max_ms']:,.0f} ms in a step of its own, and for at most "
            f"{small['itl_max_ms']:,.0f} ms in pieces of 32 tokens."
        ),
        f"In pieces of 32 tokens it took {small['steps']:.0f} steps, with {small['chat_tokens']:.0f} tokens of the "
        "chats in each; in one piece none.",
        Timed(
            f"On this machine about {knee['found']:.0f} tokens of a step are free; two rates predict "
            f"{knee['foretold']:.0f}."
        ),
        disturbance=disturbance,
    )


def draw(figures: dict, path: str) -> None:
    """Draw the time of a step by its tokens, and the knee that two rates predict."""
    knee = figures["knee"]
    steps = {int(tokens): ms for tokens, ms in knee["steps_ms"].items()}
    with panels(path, 1, width=6.4) as (axes,):
        axes.plot(list(steps), list(steps.values()), "o-", color=palette.BLUE, label="measured")
        flat, rate = knee["megabytes"] * 1e9 / knee["bandwidth"], 1e3 * 2 * knee["megabytes"] * 1e6 / 4 / knee["flops"]
        predicted = [max(flat, rate * tokens) for tokens in steps]
        axes.plot(list(steps), predicted, "--", color=palette.ORANGE, label="predicted from two rates of the matmuls")
        axes.axvline(knee["foretold"], color=palette.GREY, linestyle=":")
        words = f" the knee: {knee['foretold']:.1f} tokens"
        axes.annotate(words, (knee["foretold"], max(steps.values())), va="top", fontsize=SMALL_TEXT)
        axes.set(title="A step by its tokens, on this processor", xlabel="tokens in the step", ylabel="ms")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.legend(loc="upper left")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc)
    length = whole_number(64, 1900)
    flags.add_argument("--prompt", type=length, default=1800, help="tokens of the long prompts (64 to 1900)")
    return flags
