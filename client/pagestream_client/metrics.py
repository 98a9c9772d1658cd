"""Reads tritonserver's metrics port into plain numbers.

Only what pagestream exports: names, and values summed over labels. Used by the golden check, the
tests and the load generator; a monitoring system scrapes the port itself.
"""

from __future__ import annotations

import urllib.request


def read_metrics(url: str, *, timeout_s: float = 5.0) -> dict[str, float]:
    """Every sample at ``url`` (http://host:port/metrics) by name, summed over its labels.

    Raises OSError when nothing answers there.
    """
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return parse_metrics(response.read().decode("utf-8"))


def parse_metrics(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        # A label's value may hold spaces, so the sample's name ends at the brace if there is one.
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        value = rest.rpartition("}")[2].split()[0]
        values[name] = values.get(name, 0.0) + float(value)
    return values
