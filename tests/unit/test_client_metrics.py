"""The prometheus text that tritonserver writes, as numbers."""

import pytest

from pagestream_client.metrics import parse_metrics, read_metrics

TEXT = """\
# HELP pagestream_kv_blocks_free KV-cache blocks free
# TYPE pagestream_kv_blocks_free gauge
pagestream_kv_blocks_free{model="engine",version="1"} 48.000000
nv_inference_count{model="a b {x}",version="1"} 2
nv_inference_count{model="b",version="1"} 3 1700000000

nv_cpu_utilization 0.25
"""


def test_values_are_summed_over_labels():
    assert parse_metrics(TEXT) == {
        "pagestream_kv_blocks_free": 48.0,
        "nv_inference_count": 5.0,
        "nv_cpu_utilization": 0.25,
    }


def test_nothing_listening_is_an_os_error():
    with pytest.raises(OSError, match="refused"):
        read_metrics("http://127.0.0.1:1/metrics", timeout_s=1)
