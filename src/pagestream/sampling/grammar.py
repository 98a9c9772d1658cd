"""Structured output: grammars compiled off the engine's thread, and each request's place in one.

Owns xgrammar: nothing else imports it. A grammar is compiled before its request is admitted, so a
bad one is refused by its error and a slow one holds nobody up; compiled ones are kept in a bounded
cache. The mask of allowed tokens is filled on the host while the forward pass runs. It knows no
requests of the scheduler's; LLMEngine does.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

_CACHE_BYTES = 64 << 20
_COMPILE_THREADS = 2
_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: ")
"""What xgrammar puts before its messages: the time, and a path of its own source."""

StructuredOutput = dict[str, Any]
"""One of json_schema, regex, grammar (EBNF) or choice -> its value, as SamplingParams checked."""


class GrammarState:
    """One request's place in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_token_ids: list[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_token_ids)

    def accept(self, token_id: int) -> None:
        """Move on by a drawn token. RuntimeError if the grammar does not allow it."""
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token_id):
            raise RuntimeError(f"token {token_id} was drawn although the grammar forbids it")

    def fill(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        """Write the allowed tokens as bits; an ended grammar leaves the row as it is."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(bitmask, row)


class GrammarCompiler:
    """For one vocabulary: ``token_bytes`` by id, empty for ids that no text may contain."""

    def __init__(self, token_bytes: list[bytes], vocab_size: int, eos_token_ids: list[int]) -> None:
        self._vocab_size = vocab_size
        info = xgrammar.TokenizerInfo(
            token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=eos_token_ids,
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=_CACHE_BYTES
        )
        self._pool = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")

    def submit(self, wanted: StructuredOutput) -> Future[xgrammar.CompiledGrammar]:
        """Compile in the background; the future raises ValueError for a bad grammar."""
        return self._pool.submit(self.compile, wanted)

    def compile(self, wanted: StructuredOutput) -> xgrammar.CompiledGrammar:
        ((kind, value),) = wanted.items()
        try:
            if kind == "json_schema":
                _check_references(json.loads(value))
                # Free whitespace invites a model to go on with it for ever.
                return self._compiler.compile_json_schema(value, any_whitespace=False)
            if kind == "regex":
                return self._compiler.compile_regex(value)
            if kind == "choice":
                value = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
            return self._compiler.compile_grammar(value)
        except Exception as error:  # xgrammar raises whatever its parsers raise
            reason = _SOURCE.sub("", str(error)).strip() or type(error).__name__
            raise ValueError(f"structured_output.{kind} is not usable: {reason:.300}") from None

    def empty_bitmask(self, num_rows: int) -> npt.NDArray[np.int32]:
        """int32 [num_rows, ceil(vocab_size / 32)] that allows everything."""
        return np.full((num_rows, -(-self._vocab_size // 32)), -1, dtype=np.int32)


def _check_references(schema: Any) -> None:
    """xgrammar takes a reference that it cannot follow for anything at all."""
    if isinstance(schema, dict):
        reference = schema.get("$ref", "#")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise ValueError(f"$ref {reference!r} is not in the schema itself")
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _check_references(part)
