"""The README's examples do what it says: each is run as it stands, but for the ports."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagestream.config import EngineConfig
from pagestream_client.metrics import read_metrics

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

README = Path(__file__).parents[2] / "README.md"
EXAMPLE = re.compile(
    r"<!-- run: expect (?P<expected>.+?) -->\n```(?P<language>bash|python)\n(?P<code>.+?)```",
    re.DOTALL,
)
EXAMPLES = list(EXAMPLE.finditer(README.read_text(encoding="utf-8")))


def test_every_kind_of_example_is_there():
    languages = [example["language"] for example in EXAMPLES]
    assert languages.count("bash") >= 2
    assert languages.count("python") >= 3


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_readme_example(service, number):
    example = EXAMPLES[number]
    code = example["code"]
    for port, url in ((8000, service.http_url), (8001, service.grpc_url)):
        code = code.replace(f"localhost:{port}", url.removeprefix("http://"))
    code = code.replace("http://localhost:8002/metrics", service.metrics_url)
    assert "localhost:80" not in code
    command = {"bash": ["bash", "-euc", code], "python": [sys.executable, "-c", code]}
    done = subprocess.run(
        command[example["language"]], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(example["expected"], done.stdout), done.stdout + done.stderr


def test_the_configuration_table_lists_every_setting():
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", section("Configuration"), re.MULTILINE)
    )
    assert set(rows) == set(fields) - {"control_secret"}
    for name, default in rows.items():
        if isinstance(fields[name].default, (int, str)):
            assert default.lower() == str(fields[name].default).lower()


def section(title: str) -> str:
    return README.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_metrics_table_lists_what_the_server_exports(service):
    names = set(re.findall(r"`(pagestream_\w+)`", section("Metrics")))
    exported = {name for name in read_metrics(service.metrics_url) if "pagestream_" in name}
    assert names == exported
