"""Finds the shared library of the running Python, which tritonserver's python backend loads.

Standard library only: the Makefile runs this file as a script before anything is installed.
A libpython that is not this interpreter's own is never taken, even of the same version: the
python backend would then run one build's library on another build's standard library.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 12)


class LibpythonError(Exception):
    """This Python cannot run models in tritonserver; the message says what to install."""


def find_libpython(base_prefix: str = sys.base_prefix) -> Path:
    """The file whose name is the soname, such as libpython3.11.so.1.0."""
    configured = (sysconfig.get_config_var("INSTSONAME"), sysconfig.get_config_var("LDLIBRARY"))
    names = [str(name) for name in configured if name and ".so" in name]
    # A build without the library may still have it in a package of its own.
    names = names or [f"libpython{_version()}.so.1.0"]
    for directory in library_directories(base_prefix):
        for name in names:
            if (directory / name).is_file():
                return directory / name
    raise LibpythonError(_advice(base_prefix))


def library_directories(base_prefix: str) -> list[Path]:
    """Where an interpreter's build may have put its library, most specific first."""
    directories = []
    if libdir := sysconfig.get_config_var("LIBDIR"):
        directories.append(Path(libdir))
        if multiarch := sysconfig.get_config_var("MULTIARCH"):
            directories.append(Path(libdir) / multiarch)
    # Relocated builds keep the LIBDIR of the machine that built them.
    directories.append(Path(base_prefix) / "lib")
    return list(dict.fromkeys(directories))


def check_python() -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise LibpythonError(
            f"Python {_version()} ({sys.executable}) is not supported: "
            "use Python 3.11 or 3.12 (make PYTHON=/path/to/python3.11)"
        )
    find_libpython()


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _advice(base_prefix: str) -> str:
    library = f"libpython{_version()}"
    searched = ", ".join(map(str, library_directories(base_prefix)))
    if base_prefix == "/usr":
        remedy = f"apt-get install {library}"
    else:
        remedy = (
            f"{base_prefix} was built without --enable-shared: rebuild it with that option, or set "
            f"up with Debian's Python (apt-get install python{_version()}-venv {library}; "
            f"make clean; make PYTHON=/usr/bin/python{_version()})"
        )
    return (
        f"tritonserver's python backend needs {library}, "
        f"which is not in {searched}. What to do: {remedy}"
    )


if __name__ == "__main__":
    try:
        check_python()
    except LibpythonError as error:
        sys.exit(f"error: {error}")
