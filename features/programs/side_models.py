"""Answers programs' questions to models beside the policy, through the server they know.

    client.chat.completions.create(model="judge", messages=...)   agent.models.judge answers
    client.chat.completions.create(model="any other name", ...)   the policy answers

Invariant: keys, limits, retries, the cache and the counts are those that environments have; a
program sees no key, and a question ends with an answer or with an error that says why.
"""

from collections.abc import Mapping

from features.judges import ModelError, ModelSettings, models
from features.programs.exchange import Json
from features.programs.protocols import ProtocolError

# The one protocol that these models speak.
SERVED_AT = "/chat/completions"
# A status after which SDKs do not ask again: the trainer has done so already.
NO_ANSWER = 424


def side_model_of(body: Json, known: Mapping[str, ModelSettings]) -> str | None:
    """Returns which of the models a request is for; None: it is for the policy."""
    name = body.get("model")
    return name if isinstance(name, str) and name in known else None


async def ask_side_model(name: str, body: Json, path: str) -> Json:
    """Returns the answer of a model beside the policy, as its server gave it.

    Raises:
        ProtocolError: there is no answer; its code is that of the ModelError.
    """
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
        return await models[name].complete_async(question)
    except ModelError as error:
        raise ProtocolError(str(error), error.kind, NO_ANSWER) from None
