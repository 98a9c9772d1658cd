"""What the three models share when tritonserver initializes them: the config file and the log."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from pagestream.config import EngineConfig

INTERNAL_ERROR = "internal error; the server's log has the details"
"""What a client is told of a fault that is ours: no path and no traceback may leave."""


def load_config(args: dict[str, str]) -> EngineConfig:
    """PAGESTREAM_CONFIG, else the engine's own engine.json. Also sets up this process's log."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("PAGESTREAM_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s {args['model_name']} %(levelname)s %(message)s",
    )
    path = os.environ.get("PAGESTREAM_CONFIG")
    repository = Path(args["model_repository"]).parent
    return EngineConfig.from_json(path or repository / "engine" / "1" / "engine.json")
