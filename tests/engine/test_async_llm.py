"""AsyncLLM: many tasks share one engine; what they get is what LLM gives."""

import asyncio

import pytest

from pagestream import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.smollm2
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ["The capital of France is", "1, 2, 3,", "Hello"]


def run(smollm2, work, **options):
    async def inside():
        async with AsyncLLM(str(smollm2), num_blocks=40, **options) as llm:
            return await work(llm)

    return asyncio.run(inside())


def test_tasks_together_get_what_each_would_alone(smollm2):
    async def work(llm):
        return await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS * 2))

    answers = run(smollm2, work)
    alone = LLM(str(smollm2), num_blocks=40).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [a.token_ids for (a,) in answers] == [c.token_ids for c in alone] * 2
    assert [a.text for (a,) in answers] == [c.text for c in alone] * 2


def test_stream_chat_n_and_stop_strings(smollm2):
    messages = [{"role": "user", "content": "What is the capital of France?"}]

    async def work(llm):
        params = SamplingParams(temperature=0, max_tokens=30, stop="Paris")
        deltas = [delta async for delta in llm.stream(messages, params)]
        drawn = SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=5, ignore_eos=True)
        return deltas, await llm.generate("Hello", drawn)

    deltas, several = run(smollm2, work)
    assert "".join(delta.text for delta in deltas) == "The capital of France is "
    assert (str(deltas[-1].finish_reason), deltas[-1].stop_reason) == ("stop", "Paris")
    assert [completion.index for completion in several] == [0, 1, 2]
    assert len({completion.text for completion in several}) == 3


def test_leaving_early_and_cancelling_free_the_engine(smollm2):
    async def work(llm):
        long = SamplingParams(max_tokens=2000, ignore_eos=True)
        stream = llm.stream("Hello", long)
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(llm.generate("World", long))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.wait_for(llm.generate("Hello", GREEDY), 10)

    assert len(run(smollm2, work, max_num_seqs=1)[0].token_ids) == 10


def test_refusals(smollm2):
    async def work(llm):
        with pytest.raises(ValueError, match="the prompt is empty"):
            await llm.generate("")
        bad = SamplingParams(structured_output={"regex": "foo**"})
        with pytest.raises(ValueError, match=r"structured_output\.regex"):
            await llm.generate("Hello", bad)
        return await llm.generate("Hello", GREEDY)

    assert run(smollm2, work)[0].finish_reason is not None


def test_an_engine_that_dies_fails_its_requests(smollm2, monkeypatch):
    from pagestream.runner.model_runner import ModelRunner

    async def work(llm):
        monkeypatch.setattr(ModelRunner, "forward", lambda self, output: 1 / 0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the engine failed"):
                await asyncio.wait_for(llm.generate("Hello", GREEDY), 10)

    run(smollm2, work)


def test_outside_its_context_it_says_how_to_use_it(smollm2):
    async def work():
        with pytest.raises(RuntimeError, match="async with AsyncLLM"):
            await AsyncLLM(str(smollm2)).generate("Hello")

    asyncio.run(work())
