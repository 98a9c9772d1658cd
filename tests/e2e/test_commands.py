"""`pagestream demo` and `pagestream chat`, as a user runs them."""

import re
import signal
import subprocess
import sys
import time

import pytest
from e2e_support import wait_until

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

PAGESTREAM = [sys.executable, "-m", "pagestream.cli.main"]


@pytest.mark.long
def test_demo_streams_an_answer_and_says_what_it_took(model):
    done = subprocess.run(
        [*PAGESTREAM, "demo", "What is the capital of France?", "--model", model],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert re.search(r"time to first token +\d+ ms", done.stdout)
    assert re.search(r"time per output token +\d+\.\d ms", done.stdout)
    assert re.search(r"prompt tokens +37\n", done.stdout)
    assert re.search(r"output tokens +\d+\n", done.stdout)


def test_demo_explains_a_failed_start(tmp_path):
    done = subprocess.run(
        [*PAGESTREAM, "demo", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "config.json" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_chat_remembers_the_conversation(service):
    done = subprocess.run(
        [
            *PAGESTREAM,
            "chat",
            "--url",
            service.grpc_url,
            "--temperature",
            "0",
            "--max-tokens",
            "24",
        ],
        input="What is the capital of France?\nWhat did I ask you about?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    conversation = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "What did I ask you about?"},
    ]
    expected = service.client.generate(
        "chat", messages=conversation, temperature=0.0, max_tokens=24
    )
    assert expected.text_output in done.stdout


def test_ctrl_c_stops_an_answer_but_not_the_chat(service):
    question = "Write a very long story about a river, in many chapters."
    messages = [{"role": "user", "content": question}]
    answer = service.client.generate("chat", messages=messages, temperature=0.0, max_tokens=60)
    assert answer.finish_reason == "length", "the answer must be long for this test"
    wait_until(service.is_idle, 10, "idle before the test")
    with subprocess.Popen(
        [*PAGESTREAM, "chat", "--url", service.grpc_url, "--temperature=0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background ignores SIGINT, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as chat:
        try:
            chat.stdin.write(f"{question}\n")
            chat.stdin.flush()
            wait_until(lambda: service.metrics()["requests_running"] == 1, 20, "an answer")
            time.sleep(0.3)
            chat.send_signal(signal.SIGINT)
            wait_until(service.is_idle, 1, "idle after Ctrl-C")
            output, _ = chat.communicate("What is the capital of France?\n", timeout=30)
        finally:
            chat.kill()
    assert chat.returncode == 0
    assert "stopped" in output
    assert output.count("you>") == 3


def test_chat_without_a_server_says_what_to_do():
    done = subprocess.run(
        [*PAGESTREAM, "chat", "--url", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "pagestream serve" in done.stdout
