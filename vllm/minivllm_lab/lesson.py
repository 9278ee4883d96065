"""The common first and last steps of every lesson's script."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.platforms.device import device_name, pick_device
from minivllm_lab.results import write_json
from minivllm_lab.tables import console

if TYPE_CHECKING:
    import torch

LessonCode = Callable[..., Any]
"""A function or class of a lesson's script."""


def begin(title: str, arguments: argparse.Namespace) -> torch.device:
    """Print the title, seed torch with `--seed`, and return the device that `--device` selects;
    `arguments` has it, too.

    Raises:
        MinivllmError: there is no such device or model; the latter is found before any work.
    """
    import torch

    from minivllm.config import ModelConfig
    from minivllm.platforms.spinning import limit_spinning

    limit_spinning()
    device = arguments.device = pick_device(arguments.device)
    console.print(f"[bold]{title}[/bold], on {device_name(device)}")
    ModelConfig.from_pretrained(arguments.model)
    torch.manual_seed(arguments.seed)
    return device


def keep(
    script: str, results: dict, arguments: argparse.Namespace, draw: Callable[[dict, str], None], **context: object
) -> None:
    """Write the results if requested: as a figure (`--plot`), and as numbers (`--json`).

    `script` is the script's `__file__`, which names the record; `context` is written with the
    numbers. After `--quick` a line says that the figures are not those of the lesson's text.
    """
    if arguments.quick:
        console.print("\n--quick did less work: its figures, even counted ones, are not those that the lesson quotes")
    if arguments.plot:
        draw(results, arguments.plot)
    if arguments.json:
        write_json(arguments.json, Path(script).stem, results, **context)
    for path in filter(None, (arguments.plot, arguments.json)):
        wrote(path)


def wrote(path: str) -> None:
    """Print that a file was written."""
    console.print(f"wrote {path}", markup=False, soft_wrap=True)
