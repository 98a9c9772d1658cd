"""llama.cpp's server over HTTP; arguments: the llama-server binary, a GGUF file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measure import measure
from workload import Request

SLOTS = 16


def main() -> None:
    binary, model = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [binary, "-m", model, "-np", str(SLOTS), "-c", str(SLOTS * 1024)]
    command += ["-t", str(os.cpu_count()), "--port", str(port), "--no-cache-prompt"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(url)
        with ThreadPoolExecutor(SLOTS) as pool:
            measure(
                f"llama.cpp server, {Path(model).stem}",
                subprocess.check_output(
                    [binary, "--version"], text=True, stderr=subprocess.STDOUT
                ).split("\n")[0],
                lambda requests: sum(pool.map(lambda each: _complete(url, each), requests)),
            )
    finally:
        server.terminate()
        server.wait()


def _wait(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health") as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    sys.exit("llama-server is not ready after 120 s")


def _complete(url: str, request: Request) -> int:
    body = {
        "prompt": request.prompt_token_ids,
        "n_predict": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    post = urllib.request.Request(f"{url}/completion", data, headers)
    with urllib.request.urlopen(post) as response:
        return int(json.load(response)["tokens_predicted"])


if __name__ == "__main__":
    main()
