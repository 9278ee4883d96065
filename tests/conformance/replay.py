"""Drive the scheduler with a workload and no model, and print what it decides at each step.

    uv run python tests/conformance/replay.py WORKLOAD.json

README.md beside this file describes the workload and the trace.
"""

import json
import sys
from pathlib import Path
from typing import Any

from minivllm.core.scheduler import Scheduler
from minivllm_lab.cli import Parser
from minivllm_lab.predict.workload import Replay, configs


def replay(workload: dict[str, Any], kind: type[Scheduler] = Scheduler) -> list[dict[str, Any]]:
    """Return the trace of a whole workload, from step 0 until all requests have arrived and
    finished.
    """
    served = Replay(workload, kind(*configs(workload)))
    steps: list[dict[str, Any]] = []
    while not served.has_ended:
        served.arrive()
        steps.append(served.run())
    return steps


def main() -> int:
    """Print the trace of the workload that the command line names."""
    parser = Parser(description=__doc__)
    parser.add_argument("workload", type=Path)
    path = parser.parse_args().workload
    try:
        steps = replay(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    json.dump({"steps": steps}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
