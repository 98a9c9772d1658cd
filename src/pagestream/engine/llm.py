"""LLM: the offline API. Prompts in, completions out, over the same LLMEngine.step as the server.

Owns one LLMEngine and one Tokenizer, and one StreamDecoder per running request. Not for several
threads at once. Everything is validated before anything is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.model_store import resolve_model
from pagestream.request import FinishReason, RequestOutput
from pagestream.sampling_params import SamplingParams, validate_prompt
from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """One finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop_token_id that matched; None otherwise."""


class LLM:
    """``LLM("smollm2-135m-instruct").generate(["Hello"])``. Options are EngineConfig's fields.

    Raises ValueError or FileNotFoundError for a model or options that cannot work.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._engine = LLMEngine(EngineConfig.from_dict({"model": model, **options}))
        self._tokenizer = Tokenizer(resolve_model(model))
        self._num_requests = 0

    @property
    def engine(self) -> LLMEngine:
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete every prompt; results are in the order of the prompts.

        Give either texts or token ids, and one SamplingParams for all or one for each. Raises
        ValueError, before anything runs, naming the prompt and the field that is wrong.
        """
        ids = self._prompt_ids(prompts, prompt_token_ids)
        params = _per_prompt(sampling_params, len(ids))
        for index, (prompt, param) in enumerate(zip(ids, params, strict=True)):
            try:
                validate_prompt(prompt, self._engine.limits, "the prompt")
                param.validate(self._engine.limits)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from None
        return _Generation(self._engine, self._tokenizer, ids, params, use_tqdm).run()

    def _prompt_ids(
        self,
        prompts: str | Sequence[str] | None,
        prompt_token_ids: Sequence[Sequence[int]] | None,
    ) -> list[list[int]]:
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give either prompts or prompt_token_ids")
        if prompt_token_ids is not None:
            if any(isinstance(prompt, (int, str)) for prompt in prompt_token_ids):
                raise ValueError("prompt_token_ids must be a list of lists of token ids")
            for prompt in prompt_token_ids:
                for token_id in prompt:
                    if isinstance(token_id, bool) or not isinstance(token_id, int):
                        raise ValueError(f"prompt_token_ids must hold integers, got {token_id!r}")
            return [list(prompt) for prompt in prompt_token_ids]
        texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"prompts must hold strings, got {text!r}")
        return [self._tokenizer.encode(text) for text in texts]


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling_params")
    return list(params)


class _Generation:
    """One call of generate."""

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        params: list[SamplingParams],
        use_tqdm: bool,
    ) -> None:
        self._engine = engine
        self._params = params
        self._completions = [Completion(prompt) for prompt in prompts]
        self._decoders = [
            StreamDecoder(
                tokenizer.token_bytes,
                tokenizer.prompt_tail(prompt),
                stop=param.stop,
                skip_special_tokens=param.skip_special_tokens,
                include_stop_str_in_output=param.include_stop_str_in_output,
                min_tokens=param.min_tokens,
            )
            for prompt, param in zip(prompts, params, strict=True)
        ]
        self._num_output_tokens = 0
        self._progress = tqdm(
            total=len(prompts), desc="Completions", unit="prompt", disable=not use_tqdm
        )

    def run(self) -> list[Completion]:
        queued = 0
        try:
            while queued < len(self._completions) or self._engine.has_unfinished_requests():
                # A queue one batch deep keeps the engine full and leaves its limit out of sight.
                while queued < len(self._completions) and self._engine.has_room():
                    prompt = self._completions[queued].prompt_token_ids
                    self._engine.add_request(str(queued), prompt, self._params[queued])
                    queued += 1
                for output in self._engine.step():
                    self._take(int(output.request_id), output)
        finally:
            self._progress.close()
            self._engine.abort_all()
            while self._engine.has_unfinished_requests():
                self._engine.step()
        return self._completions

    def _take(self, index: int, output: RequestOutput) -> None:
        completion = self._completions[index]
        if completion.finish_reason is not None:
            return
        decoder = self._decoders[index]
        delta = decoder.append(
            output.token_ids, last_is_stop=output.finish_reason is FinishReason.STOP
        )
        completion.text += delta.text
        completion.token_ids += output.token_ids[: delta.num_tokens]
        self._num_output_tokens += delta.num_tokens
        if delta.stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP, delta.stop
            self._engine.abort_request(output.request_id)
        elif output.finish_reason is not None:
            completion.text += decoder.finish()
            completion.finish_reason = output.finish_reason
            completion.stop_reason = output.stop_reason
        if completion.finish_reason is not None:
            elapsed = self._progress.format_dict["elapsed"] or 1e-9
            self._progress.set_postfix_str(f"{self._num_output_tokens / elapsed:.0f} tok/s")
            self._progress.update()
