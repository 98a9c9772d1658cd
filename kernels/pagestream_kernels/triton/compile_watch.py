"""A warning for each kernel that compiles although everything was to be compiled by now.

A compilation takes seconds, and every request of the step waits for it. That happens to a shape or
a setting that the warm-up did not run. Installed through ``dispatch.warn_of_compiles``.
"""

from __future__ import annotations

import logging
from typing import Any

from triton import knobs

logger = logging.getLogger(__name__)


class _CompileWatch:
    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, **compiled: Any) -> None:
        """With the arguments of Triton's hooks; ``repr`` has the name, settings and types."""
        logger.warning(
            "%s compiled after the warm-up, and a step waited for it: %s",
            compiled["fn"].name,
            compiled["repr"],
        )
        if self._previous is not None:
            self._previous(**compiled)


def install() -> None:
    """From now on, in this process; again changes nothing."""
    current = knobs.runtime.jit_post_compile_hook
    if not isinstance(current, _CompileWatch):
        knobs.runtime.jit_post_compile_hook = _CompileWatch(current)
