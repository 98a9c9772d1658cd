"""What can go wrong with a request, as exceptions.

The server reports a refused or failed request inside the response stream, with a message and no
status; the transport reports its own failures with a gRPC status. Both become a ServerError, so
that a caller has one thing to catch. Raised by ``client`` only.
"""

from __future__ import annotations


class ServerError(RuntimeError):
    """The server refused or failed the request, or could not be reached."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        """gRPC status name of a transport failure; None for a message from the model."""


class RequestTimeout(ServerError, TimeoutError):
    """The request did not finish within its ``timeout_s``; it was cancelled."""
