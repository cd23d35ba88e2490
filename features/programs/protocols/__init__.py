"""The protocols that programs speak, each by pure functions; `PROTOCOLS` has them by path.

Nothing here knows sockets, episodes or rows.
"""

from features.programs.protocols import anthropic_messages, chat_completions, responses, token_in
from features.programs.protocols.protocol import Protocol, ProtocolError

# By the end of a request's path.
PROTOCOLS: dict[str, Protocol] = {
    "/chat/completions": chat_completions.PROTOCOL,
    "/responses": responses.PROTOCOL,
    "/messages": anthropic_messages.PROTOCOL,
    "/messages/count_tokens": anthropic_messages.COUNTING,
    "/inference/v1/generate": token_in.PROTOCOL,
}


def protocol_of(path: str) -> Protocol | None:
    """Returns the protocol of a request's path; None: none is served there."""
    for end, protocol in PROTOCOLS.items():
        if path.endswith(end):
            return protocol
    return None
