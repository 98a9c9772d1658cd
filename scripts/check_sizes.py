"""Keeps files and functions small enough to be read in one go; `make check` runs it.

A limit that is hit means that something should be split by what it is about, not cut in two.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 400
FUNCTION_LINES = 60
SHIM_LINES = 40
SOURCES = ("src", "kernels", "client")
SHIMS = "model_repository/*/1/model.py"


def too_long(path: Path, file_lines: int) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    length = len(text.splitlines())
    name = path.relative_to(ROOT)
    if length > file_lines:
        yield f"{name}: {length} lines, the limit is {file_lines}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield (
                    f"{name}:{node.lineno}: {node.name}() has {length} lines, "
                    f"the limit is {FUNCTION_LINES}"
                )


def main() -> None:
    sources = [path for source in SOURCES for path in sorted((ROOT / source).rglob("*.py"))]
    shims = sorted(ROOT.glob(SHIMS))
    problems = [problem for path in sources for problem in too_long(path, FILE_LINES)]
    problems += [problem for path in shims for problem in too_long(path, SHIM_LINES)]
    if problems:
        sys.exit("\n".join(problems))
    if not sources or not shims:
        sys.exit(f"nothing to check: no files in {', '.join(SOURCES)} or no {SHIMS}")
    print(f"{len(sources) + len(shims)} files within their size limits")


if __name__ == "__main__":
    main()
