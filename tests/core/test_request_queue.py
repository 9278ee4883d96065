"""Compare both queues with a plain list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.core.request import Request
from minivllm.core.request_queue import create_request_queue

OPERATIONS = st.lists(st.tuples(st.sampled_from(["add", "pop", "prepend", "remove"]), st.integers(0, 99)), max_size=40)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(operations=OPERATIONS, priorities=st.lists(st.integers(0, 2), min_size=41, max_size=41))
def test_the_queue_is_a_list(policy: str, operations: list[tuple[str, int]], priorities: list[int]) -> None:
    queue = create_request_queue(policy)
    model: list[Request] = []
    for index, (operation, number) in enumerate(operations):
        # Arrival times collide, so that ids have to decide.
        request = Request(f"r{index:02d}", [1], max_tokens=1, priority=priorities[index], arrival_time=number % 3)
        if operation == "add":
            queue.add_request(request)
            model.append(request)
        elif operation == "prepend":
            other = Request(f"s{index:02d}", [1], max_tokens=1, priority=priorities[-1])
            queue.prepend_requests([request, other])
            model = [request, other, *model]
        elif operation == "pop" and model:
            assert queue.peek_request() is model[0]
            assert queue.pop_request() is model.pop(0)
        elif operation == "remove":
            gone = [*model[number % 5 :: 3], request]
            queue.remove_requests(gone)
            model = [kept for kept in model if kept not in gone]
        if policy == "priority":
            model.sort(key=lambda kept: (kept.priority, kept.arrival_time, kept.request_id))
        assert list(queue) == model
        assert len(queue) == len(model)
        assert bool(queue) == bool(model)
