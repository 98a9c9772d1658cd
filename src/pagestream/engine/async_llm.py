"""AsyncLLM: the offline API for asyncio. Many tasks, one engine, batched at every step.

Owns an EngineLoop (the thread that steps) and one queue per running request; the loop's reports
hop to the event loop, where everything else here runs. Knows no server.

    async with AsyncLLM("smollm2-135m-instruct") as llm:
        async for delta in llm.stream("Hello"): ...
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from pagestream.config import EngineConfig
from pagestream.engine.completion import Completion, CompletionBuilder, Delta
from pagestream.engine.engine_loop import (
    AbortRequest,
    AddRequest,
    EngineLoop,
    Shutdown,
    StepReport,
)
from pagestream.engine.llm import Messages, check_requests, one_prompt_ids
from pagestream.model_store import resolve_model
from pagestream.request import FinishReason, RequestOutput
from pagestream.sampling_params import Limits, SamplingParams
from pagestream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Messages
_Outputs = asyncio.Queue[list[RequestOutput]]


class AsyncLLM:
    """Options are EngineConfig's fields. Use it as an async context manager, in one event loop."""

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig.from_dict({"model": model, **options})
        self._tokenizer = Tokenizer(resolve_model(model))
        self._loop = EngineLoop(config, self._report)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._limits: Limits | None = None
        self._queues: dict[str, _Outputs] = {}
        self._failure: str | None = None
        self._ids = itertools.count()

    async def __aenter__(self) -> AsyncLLM:
        self._event_loop = asyncio.get_running_loop()
        self._limits = await asyncio.to_thread(self._loop.start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.submit(Shutdown())
        await asyncio.to_thread(self._loop.join)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> list[Completion]:
        """The n answers to one prompt: a text, token ids, or a conversation.

        Raises ValueError for a request that is refused, RuntimeError if the engine failed.
        """
        ids, params = self._checked(prompt, sampling_params)
        builders = self._builders(ids, params)
        async for _ in self._run(ids, params, builders):
            pass
        return [builder.completion for builder in builders]

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[Delta]:
        """What each step adds to the answers. Leaving the iterator early aborts the request."""
        ids, params = self._checked(prompt, sampling_params)
        async for delta in self._run(ids, params, self._builders(ids, params)):
            yield delta

    def _checked(
        self, prompt: Prompt, params: SamplingParams | None
    ) -> tuple[list[int], SamplingParams]:
        if self._limits is None:
            raise RuntimeError("use AsyncLLM as a context manager: async with AsyncLLM(...) as llm")
        ids = one_prompt_ids(self._tokenizer, prompt)
        (checked,) = check_requests(self._tokenizer, self._limits, [ids], params)
        return ids, checked

    def _builders(self, ids: list[int], params: SamplingParams) -> list[CompletionBuilder]:
        now = time.monotonic()
        return [
            CompletionBuilder(self._tokenizer, ids, params, now, index) for index in range(params.n)
        ]

    async def _run(
        self, ids: list[int], params: SamplingParams, builders: list[CompletionBuilder]
    ) -> AsyncIterator[Delta]:
        if self._failure is not None:
            raise RuntimeError(self._failure)
        request_id = str(next(self._ids))
        queue = self._queues[request_id] = asyncio.Queue()
        self._loop.submit(AddRequest(request_id, ids, params, time.monotonic()))
        try:
            while not all(builder.finished for builder in builders):
                for output in await queue.get():
                    delta = self._take(output, builders[output.index])
                    if delta is not None:
                        yield delta
        finally:
            del self._queues[request_id]
            self._loop.submit(AbortRequest(request_id))

    def _take(self, output: RequestOutput, builder: CompletionBuilder) -> Delta | None:
        if output.finish_reason is FinishReason.ERROR:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            raise ValueError(output.error)
        delta = builder.take(output, time.monotonic())
        if builder.finished and output.finish_reason is None:
            self._loop.submit(AbortRequest(output.request_id, output.index))
        return delta

    def _report(self, report: StepReport) -> None:
        """Called in the engine's thread."""
        assert self._event_loop is not None
        if report.outputs or report.failure is not None:
            self._event_loop.call_soon_threadsafe(self._distribute, report)

    def _distribute(self, report: StepReport) -> None:
        by_request: dict[str, list[RequestOutput]] = {}
        for output in report.outputs:
            by_request.setdefault(output.request_id, []).append(output)
        if report.failure is not None:
            self._failure = report.failure
            for request_id in self._queues:
                failed = RequestOutput(request_id, [], finish_reason=FinishReason.ERROR)
                by_request.setdefault(request_id, []).append(failed)
        for request_id, outputs in by_request.items():
            if request_id in self._queues:
                self._queues[request_id].put_nowait(outputs)
