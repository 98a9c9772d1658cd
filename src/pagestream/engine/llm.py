"""LLM: the offline API. Prompts in, completions out, over the same LLMEngine.step as the server.

Owns one LLMEngine and one Tokenizer, and one CompletionBuilder per running answer. Not for several
threads at once (AsyncLLM is). Everything is validated before anything is queued.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from pagestream.config import EngineConfig
from pagestream.engine.completion import Completion, CompletionBuilder, Delta
from pagestream.engine.llm_engine import LLMEngine
from pagestream.model_store import resolve_model
from pagestream.request import RequestOutput
from pagestream.sampling_params import Limits, SamplingParams, validate_prompt
from pagestream.text.chat import ChatOptions
from pagestream.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[dict[str, Any]]


class LLM:
    """``LLM("smollm2-135m-instruct").generate(["Hello"])``. Options are EngineConfig's fields.

    Raises ValueError or FileNotFoundError for a model or options that cannot work.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._engine = LLMEngine(EngineConfig.from_dict({"model": model, **options}))
        self._tokenizer = Tokenizer(resolve_model(model))

    @property
    def engine(self) -> LLMEngine:
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Params = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete every prompt; results in the order of the prompts, n for each.

        Give either texts or token ids, and one SamplingParams for all or one for each. Raises
        ValueError, before anything runs, naming the prompt and the field that is wrong.
        """
        ids = prompt_ids(self._tokenizer, prompts, prompt_token_ids)
        return self._run(ids, sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        options: ChatOptions | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, each a list of {role, content}, rendered by the
        model's own template. Otherwise as ``generate``."""
        ids = chat_ids(self._tokenizer, conversations, options)
        return self._run(ids, sampling_params, use_tqdm)

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[Delta]:
        """What each step adds to the answer to one prompt: a text, token ids, or a conversation.

        Leaving the iterator early aborts the request.
        """
        ids = one_prompt_ids(self._tokenizer, prompt)
        (params,) = check_requests(self._tokenizer, self._engine.limits, [ids], sampling_params)
        return self._deltas(_Generation(self._engine, self._tokenizer, [ids], [params], False))

    def _run(self, ids: list[list[int]], params: Params, use_tqdm: bool) -> list[Completion]:
        checked = check_requests(self._tokenizer, self._engine.limits, ids, params)
        generation = _Generation(self._engine, self._tokenizer, ids, checked, use_tqdm)
        for _ in self._deltas(generation):
            pass
        return generation.completions

    def _deltas(self, generation: _Generation) -> Iterator[Delta]:
        try:
            while generation.unfinished:
                yield from generation.step()
        finally:
            generation.close()


class _Generation:
    """The answers to some prompts, run together to their end."""

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> None:
        self._engine = engine
        self._requests = list(zip(prompts, params, strict=True))
        self._arrival_time = time.monotonic()
        self._builders = [
            [
                CompletionBuilder(tokenizer, prompt, param, self._arrival_time, index)
                for index in range(param.n)
            ]
            for prompt, param in self._requests
        ]
        self._num_queued = 0
        self._num_tokens = 0
        total = sum(map(len, self._builders))
        self._progress = tqdm(total=total, desc="Completions", unit="answer", disable=not use_tqdm)

    @property
    def completions(self) -> list[Completion]:
        return [builder.completion for answers in self._builders for builder in answers]

    @property
    def unfinished(self) -> bool:
        return self._num_queued < len(self._requests) or self._engine.has_unfinished_requests()

    def step(self) -> Iterator[Delta]:
        # A queue one batch deep keeps the engine full and leaves its limit out of sight.
        while self._num_queued < len(self._requests) and self._engine.has_room(
            self._requests[self._num_queued][1].n
        ):
            prompt, params = self._requests[self._num_queued]
            self._engine.add_request(str(self._num_queued), prompt, params, self._arrival_time)
            self._num_queued += 1
        now = None
        for output in self._engine.step():
            now = now or time.monotonic()
            delta = self._take(output, now)
            if delta is not None:
                yield delta

    def close(self) -> None:
        """Abort whatever is left, and leave the engine empty."""
        self._progress.close()
        self._engine.abort_all()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _take(self, output: RequestOutput, now: float) -> Delta | None:
        builder = self._builders[int(output.request_id)][output.index]
        delta = builder.take(output, now)
        if delta is None:
            return None
        self._num_tokens += len(delta.token_ids)
        if builder.finished:
            if output.finish_reason is None:
                self._engine.abort_request(output.request_id, output.index)
            rate = self._num_tokens / max(now - self._arrival_time, 1e-9)
            self._progress.set_postfix_str(f"{rate:.0f} tok/s")
            self._progress.update()
        return delta


def check_requests(
    tokenizer: Tokenizer, limits: Limits, prompts: list[list[int]], params: Params
) -> list[SamplingParams]:
    """One SamplingParams per prompt, with bad_words as ids. ValueError names the prompt."""
    if params is None or isinstance(params, SamplingParams):
        each = [params or SamplingParams()] * len(prompts)
    elif len(params) == len(prompts):
        each = list(params)
    else:
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling_params")
    checked = []
    for index, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
        try:
            validate_prompt(prompt, limits, "the prompt")
            checked.append(tokenizer.with_bad_words(param))
            checked[-1].validate(limits)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return checked


def prompt_ids(
    tokenizer: Tokenizer,
    prompts: str | Sequence[str] | None,
    prompt_token_ids: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    if (prompts is None) == (prompt_token_ids is None):
        raise ValueError("give either prompts or prompt_token_ids")
    if prompt_token_ids is not None:
        if any(isinstance(prompt, (int, str)) for prompt in prompt_token_ids):
            raise ValueError("prompt_token_ids must be a list of lists of token ids")
        return [_checked_ids(prompt) for prompt in prompt_token_ids]
    texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"prompts must hold strings, got {text!r}")
    return [tokenizer.encode(text) for text in texts]


def chat_ids(
    tokenizer: Tokenizer,
    conversations: Messages | Sequence[Messages],
    options: ChatOptions | None = None,
) -> list[list[int]]:
    first = conversations[0] if conversations else None
    each: Any = [conversations] if isinstance(first, dict) else conversations
    return [tokenizer.encode_chat(list(messages), options) for messages in each]


def one_prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int] | Messages) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], dict):
        return tokenizer.encode_chat(items)
    return _checked_ids(items)


def _checked_ids(prompt: Sequence[Any]) -> list[int]:
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"prompt_token_ids must hold integers, got {token_id!r}")
    return list(prompt)
