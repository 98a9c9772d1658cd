"""Checks and picks the ports that tritonserver will listen on.

tritonserver opens its ports only after the models are loaded, so a port in use would be told a
minute late. Called by `pagestream serve` before anything is started.
"""

from __future__ import annotations

import errno
import random
import socket

# Below the range from which Linux takes the local ports of outgoing connections: one of those
# could take a port that was free a moment ago.
FREE_PORTS = range(20000, 32000)


class PortError(Exception):
    """A port cannot be used; the message names it and its flag."""


def resolve_ports(host: str, wanted: dict[str, int]) -> dict[str, int]:
    """The ports by flag name, each free on `host`, with 0 replaced by a free port."""
    resolved: dict[str, int] = {}
    for flag, port in wanted.items():
        if port:
            taken = next((name for name, other in resolved.items() if other == port), None)
            if taken:
                raise PortError(f"--{taken} and --{flag} are both {port}: they must differ")
            _check(host, flag, port)
            resolved[flag] = port
    for flag, port in wanted.items():
        if not port:
            resolved[flag] = _pick(host, set(resolved.values()))
    return resolved


def _pick(host: str, taken: set[int]) -> int:
    for _ in range(1000):
        port = random.SystemRandom().choice(FREE_PORTS)
        if port not in taken and _problem(host, port) is None:
            return port
    raise PortError(f"no free port on {host} between {FREE_PORTS.start} and {FREE_PORTS.stop - 1}")


def _check(host: str, flag: str, port: int) -> None:
    number = _problem(host, port)
    if number is None:
        return
    if number == errno.EADDRINUSE:
        raise PortError(
            f"port {port} is in use by another program: "
            f"choose another one with --{flag}, or --{flag} 0 to have a free one picked"
        )
    if number == errno.EACCES:
        raise PortError(f"--{flag} {port} needs privileges: choose a port above 1023")
    raise PortError(f"--host {host} --{flag} {port} cannot be used: {errno.errorcode[number]}")


def _problem(host: str, port: int) -> int | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    with socket.socket(family, kind, protocol) as probe:
        # As tritonserver does: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno or errno.EADDRNOTAVAIL
    return None
