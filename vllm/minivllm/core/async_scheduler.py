"""Scheduling a step while earlier ones are still being computed, so that the device does not wait
for the host.

The tokens that the steps in flight will sample are not known yet, only that there will be some:
each is counted in `num_output_placeholders`, and its value stays with the worker, which fills it
into the next step's inputs. Three things follow. A stop token is noticed one step late, and
whatever that step sampled for the request is dropped; `max_tokens` and `max_model_len` can be
foreseen. A block is published when its last token is known and computed, not when that token is
scheduled. And a preempted request is resumed only after the outputs that were in flight have
arrived.

If the model is a pipeline of stages, several steps are in flight too, but a request's next token is
scheduled only when the last one has arrived, because it has to travel from the last stage to the
first. Other requests fill the pipeline, unless all were admitted into the same step: the scheduler
does not split them up.

In vLLM v0.33.0: `vllm/v1/core/sched/async_scheduler.py` (`AsyncScheduler`).
"""

from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.core.step import Step

UNKNOWN_TOKEN = -1
"""Stands for a draft token that only the worker will know."""


class AsyncScheduler(Scheduler):
    """A scheduler whose `schedule` may be called again before `update_from_output`; outputs must
    come in the order of their steps.
    """

    def _make_output(self, step: Step) -> SchedulerOutput:
        output = super()._make_output(step)
        if not self.config.async_scheduling:
            # In a pipeline the first stage does not have the token that the last one has sampled:
            # send it along.
            sampled = [[] if request.is_prefill_chunk else [request.all_token_ids[-1]] for request in step.continued]
            output.scheduled_cached_reqs.new_token_ids = sampled
        return output

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        super()._update_after_schedule(output)
        drafts = output.scheduled_spec_decode_tokens
        most = output.num_spec_tokens_to_schedule
        # Only their number matters here; the worker knows the tokens.
        unknown_drafts = [UNKNOWN_TOKEN] * (self.drafting.num_speculative_tokens if most is None else most)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                # One sampled token, and one for each draft that may be accepted.
                request.num_output_placeholders += 1 + len(drafts.get(request_id, ()))
                # The mask of a grammar needs to know the drafts before it.
                request.spec_token_ids = [] if request.structured_output_request else unknown_drafts

    def cap_num_tokens(self, request: Request, num_new_tokens: int, step: Step) -> int:
        """Return 0 for a request that has to wait for its outputs in flight, else the base class's
        limit.
        """
        if request.num_output_placeholders > 0 and not self._may_run_ahead(request):
            return 0
        return super().cap_num_tokens(request, num_new_tokens, step)

    def _may_run_ahead(self, request: Request) -> bool:
        """Return whether a request may get another step while it has outputs in flight.

        It may not without async scheduling, if those outputs are sure to end it, or if it has a
        grammar, whose mask depends on them.
        """
        if not self.config.async_scheduling or request.structured_output_request is not None:
            return False
        # Each step in flight yields at least one token: all placeholders but one may be drafts that
        # are rejected.
        least = request.num_computed_tokens + 2 - request.num_output_placeholders
        return least < request.num_prompt_tokens + request.max_tokens

    def _is_blocked(self, request: Request, running_loras: set[int]) -> bool:
        return request.num_output_placeholders > 0 or super()._is_blocked(request, running_loras)

    def _roll_back_rejected(self, request: Request, num_drafts: int, num_accepted: int, num_invalid: int) -> None:
        super()._roll_back_rejected(request, num_drafts, num_accepted, num_invalid)
        request.num_output_placeholders -= num_drafts - num_accepted
        if request.status is RequestStatus.PREEMPTED:
            request.num_computed_tokens = 0  # as it was: there is nothing left to roll back

    def _update_request_with_output(self, request: Request, sampled: list[int]) -> tuple[list[int], bool]:
        was_preempted = request.status is RequestStatus.PREEMPTED
        new_token_ids, has_stopped = super()._update_request_with_output(request, sampled)
        request.num_output_placeholders -= len(sampled)
        assert request.num_output_placeholders >= 0
        if not was_preempted:
            super()._cache_accepted(request)
        elif has_stopped:
            # It was preempted while this step computed its last token, so it need not run again.
            self.waiting.remove_requests((request,))
        return new_token_ids, has_stopped

    def _cache_accepted(self, request: Request) -> None:
        """Do nothing: `_update_request_with_output` has already published these blocks."""
