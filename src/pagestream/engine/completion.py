"""Completion: one finished answer of the offline API, and CompletionBuilder, which makes it.

Turns the engine's outputs into text as the server's postprocessing does, with the same
StreamDecoder. Used by LLM and AsyncLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagestream.request import FinishReason, RequestOutput, TokenLogprobs
from pagestream.sampling_params import SamplingParams
from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Timing:
    """Seconds since the request arrived; None for what did not happen."""

    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    """When each token was known."""

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(slots=True)
class Completion:
    """One answer to one prompt, finished unless finish_reason is None."""

    prompt_token_ids: list[int]
    index: int = 0
    """Which of the prompt's n answers."""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop_token_id that matched, or "deadline"; None otherwise."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one answer."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class CompletionBuilder:
    """``arrival_time``: time.monotonic() seconds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        index: int = 0,
    ) -> None:
        self.completion = Completion(prompt_token_ids, index)
        if params.logprobs is not None:
            self.completion.logprobs = []
        self._arrival_time = arrival_time
        self._texts: list[str] = []
        self._decoder = StreamDecoder(
            tokenizer.token_bytes,
            tokenizer.prompt_tail(prompt_token_ids),
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    @property
    def finished(self) -> bool:
        return self.completion.finish_reason is not None

    def take(self, output: RequestOutput, now: float) -> Delta | None:
        """Absorb one output; None if the answer had ended (by a stop string) already.

        When the answer ends here although the output does not say so, the request is to be
        aborted.
        """
        completion = self.completion
        if self.finished:
            return None
        ended_by_token = output.finish_reason is FinishReason.STOP
        text = self._decoder.append(output.token_ids, last_is_stop=ended_by_token)
        delta_text, num_tokens = text.text, text.num_tokens
        if text.stop is None and output.finish_reason is not None:
            text = self._decoder.finish()
            delta_text += text.text
            completion.finish_reason = output.finish_reason
            completion.stop_reason = output.stop_reason
        if text.stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP, text.stop
        token_ids = output.token_ids[:num_tokens]
        logprobs = None if output.logprobs is None else output.logprobs[:num_tokens]
        self._texts.append(delta_text)
        if self.finished:
            completion.text = "".join(self._texts)
        completion.token_ids += token_ids
        if completion.logprobs is not None and logprobs is not None:
            completion.logprobs += logprobs
        self._note_first(output)
        self._note_times(num_tokens, now - self._arrival_time)
        return Delta(
            completion.index,
            delta_text,
            token_ids,
            logprobs,
            completion.finish_reason,
            completion.stop_reason,
        )

    def _note_first(self, output: RequestOutput) -> None:
        completion = self.completion
        if output.num_cached_tokens is not None:
            completion.num_cached_tokens = output.num_cached_tokens
            completion.timing.queued_s = output.queued_s
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = output.prompt_logprobs

    def _note_times(self, num_tokens: int, elapsed: float) -> None:
        timing = self.completion.timing
        timing.token_times_s += [elapsed] * num_tokens
        if timing.ttft_s is None and num_tokens:
            timing.ttft_s = elapsed
        if self.finished:
            timing.e2e_s = elapsed
