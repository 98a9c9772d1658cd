"""A small typed client for a pagestream server, over gRPC.

Needs ``tritonclient[grpc]`` and nothing of the engine, so it can be installed where the server is
not. Start at PagestreamClient.
"""

from pagestream_client.client import PagestreamClient, TokenStream
from pagestream_client.errors import RequestTimeout, ServerError
from pagestream_client.inputs import Message, RequestInputs
from pagestream_client.results import Completion, StreamChunk

__all__ = [
    "Completion",
    "Message",
    "PagestreamClient",
    "RequestInputs",
    "RequestTimeout",
    "ServerError",
    "StreamChunk",
    "TokenStream",
]
