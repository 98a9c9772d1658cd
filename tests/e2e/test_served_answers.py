"""What a running server answers: the reference's ids, one text however it is sent, batching."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_support import Service, wait_until

from pagestream.cli.golden import compare_ids, load_golden
from pagestream_client import Completion

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
PROMPTS = {prompt.name: prompt for prompt in load_golden(GOLDEN)}
SHORT = ("chat_math", "chat_unicode", "raw_list")


def ask(service: Service, name: str, *, stream: bool, **params) -> Completion:
    prompt = PROMPTS[name]
    return service.client.generate(
        prompt_token_ids=prompt.prompt_token_ids,
        max_tokens=len(prompt.output_ids),
        temperature=0.0,
        ignore_eos=True,
        return_token_ids=True,
        skip_special_tokens=False,
        stream=stream,
        **params,
    )


@pytest.fixture(scope="module")
def answers(service) -> dict[tuple[str, bool], Completion]:
    """Every short prompt streamed and whole, and one long one in chunks, all at once."""
    asked = [(name, stream) for name in SHORT for stream in (True, False)]
    asked.append(("raw_long_code", True))
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:
        results = list(pool.map(lambda each: ask(service, each[0], stream=each[1]), asked))
    return dict(zip(asked, results, strict=True))


def test_ids_equal_the_reference_with_all_at_once(answers):
    for (name, _), completion in answers.items():
        comparison = compare_ids(PROMPTS[name], completion.output_token_ids)
        assert not comparison.mismatch, comparison
        assert comparison.num_compared >= 42


def test_ids_equal_the_reference_alone(service):
    completion = ask(service, "chat_unicode", stream=True)
    comparison = compare_ids(PROMPTS["chat_unicode"], completion.output_token_ids)
    assert not comparison.mismatch, comparison
    assert comparison.num_compared == 64


@pytest.mark.parametrize("name", SHORT)
def test_streamed_text_joined_is_the_whole_text_and_the_reference_text(answers, name, tokenizer):
    streamed, whole = answers[name, True], answers[name, False]
    assert streamed.num_chunks > 2
    assert whole.num_chunks == 1
    assert streamed.text_output == whole.text_output
    # For a cut character the tokenizer and the contract write different replacements.
    expected = tokenizer.decode(list(streamed.output_token_ids), skip_special_tokens=False)
    assert streamed.text_output.rstrip("\N{REPLACEMENT CHARACTER}") == expected.rstrip(
        "\N{REPLACEMENT CHARACTER}"
    )


def test_counts_and_finish_reason(answers):
    for (name, _), completion in answers.items():
        assert completion.num_input_tokens == len(PROMPTS[name].prompt_token_ids)
        assert completion.num_output_tokens == len(completion.output_token_ids) == 64
        assert completion.finish_reason == "length"


def test_chat_template_stop_and_special_tokens(service):
    """The reference's own chat prompt, built by the server, ends at the end-of-turn token."""
    completion = service.client.generate(
        "chat",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0.0,
        return_token_ids=True,
    )
    reference = PROMPTS["chat_capital"]
    assert completion.num_input_tokens == len(reference.prompt_token_ids)
    assert completion.text_output == "The capital of France is Paris."
    assert completion.finish_reason == "stop"
    assert completion.output_token_ids == reference.output_ids[: len(completion.output_token_ids)]


def test_all_three_ensembles_say_the_same(service):
    text = PROMPTS["raw_short"]
    prompt = "The capital of France is"
    greedy = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    by_ensemble = service.client.generate("ensemble", text_input=prompt, **greedy)
    by_vllm = service.client.generate("vllm", text_input=prompt, sampling_parameters=greedy)
    assert by_ensemble.text_output
    assert by_vllm.text_output == by_ensemble.text_output
    by_ids = service.client.generate(
        "chat",
        prompt_token_ids=text.prompt_token_ids,
        return_token_ids=True,
        **greedy,
    )
    assert by_ids.output_token_ids == text.output_ids[:12]


def test_http_generate_and_generate_stream_say_the_same(service):
    body = {"text_input": "Once upon a time", "max_tokens": 16, "temperature": 0.0}
    whole = service.generate("ensemble", body)
    assert whole.status == 200
    events = service.generate_stream("ensemble", {**body, "stream": True})
    assert events.status == 200
    assert len(events.body) > 1
    assert "".join(event["text_output"] for event in events.body) == whole.body["text_output"]
    assert [event["finish_reason"] for event in events.body][-1] == whole.body["finish_reason"]
    assert sum(event["num_output_tokens"] for event in events.body) == 16
    assert whole.body["num_output_tokens"] == 16


def test_stop_words_cut_the_text(service):
    prompt = {"text_input": "Count: one, two, three,", "temperature": 0.0, "max_tokens": 40}
    free = service.client.generate(**prompt)
    stop = free.text_output[8:12]
    for stream in (True, False):
        cut = service.client.generate(**prompt, stop_words=[stop], stream=stream)
        assert cut.text_output == free.text_output[: free.text_output.index(stop)]
        assert cut.finish_reason == "stop"


def test_a_seed_repeats_its_draw_in_any_batch(service):
    def draw(seed: int) -> str:
        return service.client.generate(
            text_input="A strange day:", max_tokens=16, temperature=1.5, seed=seed
        ).text_output

    alone = draw(7)
    with ThreadPoolExecutor(max_workers=6) as pool:
        together = list(pool.map(draw, (7, 8, 9, 7, 10, 11)))
    assert together[0] == together[3] == alone
    assert len(set(together)) > 1


def test_sixteen_streams_batch_well(service):
    """Under half the time of one after another, with more than 8 requests in a step meanwhile."""

    def answer(i: int) -> int | None:
        return service.client.generate(
            text_input=f"Write a story about the number {i}.",
            max_tokens=12,
            ignore_eos=True,
            temperature=0.0,
        ).num_output_tokens

    started = time.monotonic()
    one_by_one = [answer(i) for i in range(16)]
    sequential_s = time.monotonic() - started

    batch_sizes = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            batch_sizes.append(service.metrics()["step_batch_size"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=16) as pool:
        at_once = list(pool.map(answer, range(16)))
    concurrent_s = time.monotonic() - started
    done.set()
    watcher.join()

    assert one_by_one == at_once == [12] * 16
    assert concurrent_s < sequential_s / 2, f"{concurrent_s:.2f} s, {sequential_s:.2f} s"
    assert max(batch_sizes) > 8


def test_generated_tokens_are_counted(service):
    # Metrics are exported a moment after the step that changed them.
    wait_until(service.is_idle, 5, "idle before the test")
    before = service.metrics()["generated_tokens_total"]
    service.client.generate(text_input="Hi", max_tokens=5, ignore_eos=True)
    wait_until(
        lambda: service.metrics()["generated_tokens_total"] == before + 5, 1, "5 tokens counted"
    )
