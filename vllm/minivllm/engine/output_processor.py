"""Turn sampled tokens into outputs for the user: text, stop strings, log probabilities, completions
grouped by prompt.

In vLLM v0.33.0: `vllm/v1/engine/output_processor.py` (`OutputProcessor`, `RequestState`).
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from minivllm.config import NO_PARTS, Parts
from minivllm.core.engine_messages import EngineCoreOutput, EngineCoreRequest
from minivllm.engine.detokenizer import IncrementalDetokenizer, make_detokenizer
from minivllm.engine.iteration_stats import IterationStats
from minivllm.engine.logprobs import chosen, logprobs_by_token
from minivllm.engine.parallel_sampling import ParentRequest
from minivllm.outputs import CompletionOutput, Logprobs, RequestMetrics, RequestOutput
from minivllm.sampling_params import RequestOutputKind


@dataclass(slots=True)
class RequestState:
    """The front end's state of one child request. `completion` has everything so far, except for
    the text, which the detokenizer holds. `num_sent_…` fields: how much of it a DELTA stream has
    sent.
    """

    request: EngineCoreRequest
    prompt: str | None
    parent: ParentRequest
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    metrics: RequestMetrics
    num_detokenized: int = 0
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    num_sent_tokens: int = 0
    num_sent_characters: int = 0

    def drop_tokens_behind(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens: accepted draft tokens may follow the one that
        completes a stop string.
        """
        completion = self.completion
        del completion.token_ids[num_tokens:]
        if completion.logprobs is not None:
            del completion.logprobs[num_tokens:]
            completion.cumulative_logprob = sum(chosen(entry).logprob for entry in completion.logprobs)


class OutputProcessor:
    """Keeps track of unfinished requests and processes their outputs."""

    def __init__(self, tokenizer: Tokenizer | None, parts: Parts = NO_PARTS) -> None:
        self.tokenizer = tokenizer
        self._parts = parts
        self.states: dict[str, RequestState] = {}
        self._stats: defaultdict[int, IterationStats] = defaultdict(IterationStats)

    def add_request(self, request: EngineCoreRequest, prompt: str | None, index: int, parent: ParentRequest) -> None:
        """Register a request, child `index` of `parent`."""
        params = request.sampling_params
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = make_detokenizer(self.tokenizer, request.prompt_token_ids, params, self._parts)
        completion = CompletionOutput(index, "", [], lora_request=request.lora_request)
        if params.logprobs is not None:
            completion.logprobs = []
            completion.cumulative_logprob = 0.0
        metrics = RequestMetrics(request.arrival_time)
        self.states[request.request_id] = RequestState(request, prompt, parent, completion, detokenizer, metrics)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Process a step's outputs. Return outputs for the user, and the ids of requests ended by a
        stop string.

        The core must abort the latter: it does not see text, and would continue them.
        """
        shown: list[RequestOutput] = []
        to_abort: list[str] = []
        now = time.monotonic()
        for output in outputs:
            state = self.states.get(output.request_id)
            if state is None:
                continue  # It was aborted while its step was running.
            self._observe(state, output, now)
            if self._detokenize(state):
                to_abort.append(output.request_id)
            if (reason := state.completion.finish_reason) is not None:
                del self.states[output.request_id]
                self._count_finished(state, reason, output.num_preemptions)
            elif state.request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            request_output = self._make_output(state)
            if request_output is not None:
                shown.append(request_output)
        return shown, to_abort

    def note_scheduled(self, request_ids: Iterable[str], now: float) -> None:
        """Record when the core first admitted these requests; preempted requests are admitted
        again.
        """
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is not None and state.metrics.scheduled_time is None:
                state.metrics.scheduled_time = now

    def lora_names(self) -> tuple[set[str], set[str]]:
        """Return the adapter names of unfinished requests: first those of admitted requests, then
        of the others.
        """
        running, waiting = set[str](), set[str]()
        for state in self.states.values():
            if (adapter := state.request.lora_request) is not None:
                (waiting if state.metrics.scheduled_time is None else running).add(adapter.lora_name)
        return running, waiting

    def take_stats(self, engine_index: int = 0) -> IterationStats:
        """Return what has been measured since the last call for the requests of this core."""
        return self._stats.pop(engine_index, None) or IterationStats()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; any later output of theirs is ignored."""
        for request_id in request_ids:
            state = self.states.pop(request_id, None)
            if state is not None:
                self._count_finished(state, "abort")

    def aborted(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End these requests with the finish reason "abort"; return their last outputs."""
        states = [self.states.pop(request_id) for request_id in request_ids if request_id in self.states]
        for state in states:
            state.completion.finish_reason = "abort"
            self._detokenize(state)
            # Again: the text that was held back may have contained a stop string.
            state.completion.finish_reason = "abort"
            state.completion.stop_reason = None
            self._count_finished(state, "abort")
        return [output for state in states if (output := self._make_output(state)) is not None]

    def _observe(self, state: RequestState, output: EngineCoreOutput, now: float) -> None:
        completion = state.completion
        completion.token_ids += output.new_token_ids
        completion.finish_reason = output.finish_reason
        completion.stop_reason = output.stop_reason
        completion.error = output.error
        completion.invalid_request = output.invalid_request
        state.num_cached_tokens = output.num_cached_tokens
        state.parent.kv_transfer_params = output.kv_transfer_params or state.parent.kv_transfer_params
        if output.error is None:
            num_prompt_tokens = len(state.request.prompt_token_ids)
            self._stats_of(state).observe_tokens(state.metrics, output, num_prompt_tokens, now)
        if output.new_prompt_logprobs is not None:
            state.prompt_logprobs = [None]  # nothing comes before the first token, so it has none
            for entry in output.new_prompt_logprobs:
                state.prompt_logprobs.append(logprobs_by_token(entry, self.tokenizer, state.prompt_logprobs))
        if completion.logprobs is not None and output.new_logprobs is not None:
            for entry in output.new_logprobs:
                completion.logprobs.append(logprobs_by_token(entry, self.tokenizer, completion.logprobs))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprobs[0]

    def _count_finished(self, state: RequestState, reason: str, num_preemptions: int = 0) -> None:
        ended = state.parent.end(state.completion.index)
        self._stats_of(state).observe_finished(
            state.metrics,
            ended,
            finish_reason=reason,
            num_prompt_tokens=len(state.request.prompt_token_ids),
            num_generation_tokens=len(state.completion.token_ids),
            max_tokens=state.request.sampling_params.max_tokens or 0,
            num_preemptions=num_preemptions,
        )

    def _stats_of(self, state: RequestState) -> IterationStats:
        return self._stats[state.request.data_parallel_rank or 0]

    def _detokenize(self, state: RequestState) -> bool:
        """Turn new tokens into text. Return whether a stop string ended a request that the core
        would continue.

        If only the final output is wanted and there are no stop strings, decode once, at the end.
        """
        detokenizer = state.detokenizer
        params = state.request.sampling_params
        completion = state.completion
        finished = completion.finished()
        # Decoding once at the end is cheaper than token by token.
        later = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop and not finished
        if detokenizer is None or later:
            return False
        new_token_ids = completion.token_ids[state.num_detokenized :]
        state.num_detokenized = len(completion.token_ids)
        stop = detokenizer.update(new_token_ids, stopped_by_token=completion.finish_reason == "stop")
        if stop is None:
            if finished:
                detokenizer.finish()
            return False
        state.drop_tokens_behind(detokenizer.num_tokens)
        completion.finish_reason = "stop"
        completion.stop_reason = stop
        return not finished

    def _make_output(self, state: RequestState) -> RequestOutput | None:
        """Return the request's next output; None for FINAL_ONLY while any completion of the prompt
        is unfinished.
        """
        kind = state.request.sampling_params.output_kind
        parent = state.parent
        completion = self._completion(state, kind)
        parent.observe(completion)
        # The output of a prompt has all of its completions.
        if kind is RequestOutputKind.FINAL_ONLY and parent.unfinished:
            return None
        completions = [completion] if kind is RequestOutputKind.DELTA else parent.completions()
        return RequestOutput(
            parent.request_id,
            state.prompt,
            state.request.prompt_token_ids,
            state.prompt_logprobs,
            completions,
            finished=not parent.unfinished,
            metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
            kv_transfer_params=parent.kv_transfer_params,
            lora_request=state.request.lora_request,
        )

    def _completion(self, state: RequestState, kind: RequestOutputKind) -> CompletionOutput:
        known = state.completion
        text = self._showable_text(state)
        # Slices are copies: the state's lists grow while the reader holds this output.
        shown = replace(
            known,
            text=text[state.num_sent_characters :],
            token_ids=known.token_ids[state.num_sent_tokens :],
            logprobs=known.logprobs and known.logprobs[state.num_sent_tokens :],
        )
        if kind is RequestOutputKind.DELTA:
            state.num_sent_characters = len(text)
            state.num_sent_tokens = len(known.token_ids)
        return shown

    def _showable_text(self, state: RequestState) -> str:
        if state.detokenizer is None:
            return ""
        text = state.detokenizer.text
        return text if state.completion.finished() else text[: state.detokenizer.streamable_length()]
