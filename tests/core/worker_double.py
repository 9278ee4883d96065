"""A worker without a model, for tests: it knows only what the scheduler tells it, and remembers
what each slot holds.

In place of keys and values a slot holds the whole prefix that ends there (as a running hash). A
forward pass writes the scheduled tokens of all requests, then reads back every position that each
of them attends to. So a block that was never computed, was given to two requests, or was
overwritten too early fails an assertion, where a real model would generate a wrong token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

NextToken = Callable[[list[int]], int]


def prefixes_of(namespace: object, token_ids: Iterable[int]) -> list[int]:
    """Return the hash of each prefix of these tokens."""
    return [*accumulate(token_ids, lambda prefix, token_id: hash((prefix, token_id)), initial=hash(namespace))][1:]


@dataclass
class WorkerRequest:
    token_ids: list[int]
    block_ids: list[int]
    namespace: object


@dataclass
class WorkerDouble:
    """A worker that samples `next_token(token_ids)`, the token that the model would generate after
    these.

    A request's `sampling_params` stand for whatever else its keys and values depend on, such as an
    adapter.
    """

    block_size: int
    next_token: NextToken
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    requests: dict[str, WorkerRequest] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one forward pass; raise `AssertionError` if a request would attend to anything but
        its own prefix.
        """
        starts = self._update_states(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self._write(request_id, starts[request_id], count, output.scheduled_spec_decode_tokens.get(request_id, []))
        sampled: dict[str, list[int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            self._check_reads(request_id, starts[request_id] + count, drafts)
            tokens = self._sample(request_id, starts[request_id] + count, drafts)
            if tokens:
                sampled[request_id] = tokens
                self.requests[request_id].token_ids += tokens
        return ModelRunnerOutput(sampled)

    def reset(self) -> None:
        """Forget all requests and transfers, as a rank does after a failed step."""
        self.requests.clear()

    def _update_states(self, output: SchedulerOutput) -> dict[str, int]:
        for request_id in output.finished_req_ids | output.preempted_req_ids:
            self.requests.pop(request_id, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.requests
            self.requests[new.req_id] = WorkerRequest(
                list(new.prefill_token_ids), list(new.block_ids), new.sampling_params
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.requests[request_id].block_ids += block_ids or []
            starts[request_id] = start
        assert list(starts) == list(dict.fromkeys(starts))
        assert set(starts) == set(output.num_scheduled_tokens) >= set(output.scheduled_spec_decode_tokens)
        return starts

    def _prefixes(self, request_id: str, stop: int, drafts: list[int]) -> list[int]:
        request = self.requests[request_id]
        prefixes = prefixes_of(request.namespace, [*request.token_ids, *drafts][:stop])
        assert len(prefixes) == stop
        return prefixes

    def _slot(self, request_id: str, position: int) -> tuple[int, int]:
        block_id = self.requests[request_id].block_ids[position // self.block_size]
        assert block_id != 0, "the null block was handed out"
        return block_id, position % self.block_size

    def _write(self, request_id: str, start: int, count: int, drafts: list[int]) -> None:
        prefixes = self._prefixes(request_id, start + count, drafts)
        for position in range(start, start + count):
            self.slots[self._slot(request_id, position)] = prefixes[position]

    def _check_reads(self, request_id: str, stop: int, drafts: list[int]) -> None:
        for position, prefix in enumerate(self._prefixes(request_id, stop, drafts)):
            slot = self._slot(request_id, position)
            assert self.slots.get(slot) == prefix, f"{request_id} reads another prefix at position {position}"

    def _sample(self, request_id: str, stop: int, drafts: list[int]) -> list[int]:
        known = self.requests[request_id].token_ids
        if stop < len(known):
            return []
        sampled = [self.next_token(known)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(self.next_token(known + sampled))
        return sampled


@dataclass
class WorkerAhead(WorkerDouble):
    """A worker that knows what the scheduler does not know yet: how many drafts were rejected, and
    its own drafts.
    """

    drafts: dict[str, list[int]] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        cached, unknown = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
        starts = [
            min(told, len(self.requests[request_id].token_ids) - 1)
            for request_id, told in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        own = {request_id: self.drafts.get(request_id, [])[: len(theirs)] for request_id, theirs in unknown.items()}
        invalid = {request_id: len(theirs) - len(own[request_id]) for request_id, theirs in unknown.items()}
        counts = {name: count - invalid.get(name, 0) for name, count in output.num_scheduled_tokens.items()}
        known = replace(
            output,
            scheduled_cached_reqs=replace(cached, num_computed_tokens=starts),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens={name: theirs for name, theirs in own.items() if theirs},
        )
        return replace(super().execute(known), num_invalid_spec_tokens=invalid)
