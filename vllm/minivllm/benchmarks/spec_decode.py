"""What became of a server's drafts, from its `/metrics`.

In vLLM v0.33.0: `fetch_spec_decode_metrics` in `vllm/benchmarks/serve.py`.
"""

import re

import aiohttp

from minivllm.benchmarks.client import Target, new_session
from minivllm.core.stats import SpecDecodingStats

COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
SECONDS = 10.0


async def fetch_spec_decode_metrics(target: Target) -> SpecDecodingStats | None:
    """Return a server's counts since its start, over all of its cores; None if it has no such metrics."""
    url, timeout = f"{target.base_url.rstrip('/')}/metrics", aiohttp.ClientTimeout(total=SECONDS)
    try:
        async with new_session() as session, session.get(url, headers=dict(target.headers), timeout=timeout) as reply:
            return counts_of(await reply.text()) if reply.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


def counts_of(text: str) -> SpecDecodingStats | None:
    """Return the counts in this text of Prometheus's format; None if there are none."""
    counts, by_position = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0), dict[int, int]()
    found = COUNTER.findall(text)
    for name, labels, value in found:
        if name in counts:
            counts[name] += int(float(value))
        elif name == "accepted_tokens_per_pos" and (place := POSITION.search(labels)):
            by_position[int(place[1])] = by_position.get(int(place[1]), 0) + int(float(value))
    if not found:
        return None
    per_pos = [by_position.get(position, 0) for position in range(max(by_position, default=-1) + 1)]
    return SpecDecodingStats(counts["drafts"], counts["draft_tokens"], counts["accepted_tokens"], per_pos)
