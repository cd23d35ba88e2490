"""Answers programs' questions to models beside the policy, through the server they know.

    client.chat.completions.create(model="judge", messages=...)   judges.models.judge answers
    client.chat.completions.create(model="any other name", ...)   the policy answers

Invariant: keys, limits, retries, the cache and the counts are those that environments have; a
program sees no key, and a question ends with an answer or with an error that says why.
"""

from collections.abc import Sequence

from custom.model_errors import ModelError
from custom.side_services import SideService
from features.programs.exchange import Json
from features.programs.protocols import ProtocolError

# The one protocol that these services speak.
SERVED_AT = "/chat/completions"
# A status after which SDKs do not ask again: the trainer has done so already.
NO_ANSWER = 424


def side_service_of(body: Json, services: Sequence[SideService]) -> SideService | None:
    """Returns the service that a request is for; None: it is for the policy."""
    name = body.get("model")
    for service in services:
        if isinstance(name, str) and service.answer is not None and name in service.names:
            return service
    return None


async def ask_service(service: SideService, body: Json, path: str) -> Json:
    """Returns the answer of what a request asks beside the policy, as its server gave it.

    Raises:
        ProtocolError: there is no answer; its code is that of the ModelError.
    """
    name = str(body["model"])
    if not path.endswith(SERVED_AT):
        raise ProtocolError(
            f"model={name!r} is a model beside the policy, which answers /v1{SERVED_AT} alone"
        )
    if body.get("stream"):
        raise ProtocolError(
            f"stream is not served for model={name!r}, a model beside the policy; ask without it"
        )
    question = {key: value for key, value in body.items() if not key.startswith("stream")}
    try:
        return await service.ask(name, question)
    except ModelError as error:
        raise ProtocolError(str(error), error.kind, NO_ANSWER) from None
