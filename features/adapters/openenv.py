"""Environments of OpenEnv, played over the WebSocket of a server that runs.

    this adapter --{"type": "reset" | "step" | "close", "data": ...}--> server's /ws
                 <--{"type": "observation", "data": {observation, reward, done}}--

The package `openenv` is not needed here, and lives with the server: it excludes vLLM's `mcp`.
Invariant: an episode has one connection, which is one session of the server's; where it breaks the
episode has crashed, and it is never taken up again.
"""

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import jsonschema
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
from websockets.sync.client import ClientConnection, connect

from custom.env import Observation
from custom.env_calls import cut_middle
from features.adapters.base import Adapter, Step

logger = logging.getLogger(__name__)
# Seconds to connect, and between two looks whether the pool has ended the call.
CONNECT_S = 20.0
LOOK_S = 0.2
# Bytes of one message of the server's.
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_ERROR_CHARS = 300
# After so many messages that nobody asked for a session is given up.
MAX_DROPPED = 100
# Seeds lie below this; the protocol wants them to be 0 or more.
SEEDS = 2**31
# Every action and observation has these beside its own fields.
COMMON = ("metadata", "done", "reward")
# The releases whose protocol this is.
VERSIONS = "openenv 0.10 (openenv-core 0.3)"


class OpenEnvEnvironment(Adapter):
    """Plays `openenv:URL`, such as openenv:http://127.0.0.1:8000.

    Args:
        identifier: the server's URL.
        prompt_template: fields {name}, {observation}, and {action}, which says how one is written.
        fields: of observations that are shown; None: all.
        reset: further arguments of every reset, which a row's columns win over.
        invalid_reward: of an answer that is no action of the environment's; the game goes on.
        timeout_s: for one reply, in seconds; None: the deadlines of `agent` alone.
    Where an action has a single field and that is text, the answer is taken as it is; else it holds
    a JSON object with the fields (of a single field, its value is enough). An error that the
    environment raised is a crash.
    """

    TEMPLATE = "{observation}\n\n{action}"

    def __init__(
        self,
        identifier: str,
        *,
        fields: Sequence[str] | None = None,
        reset: Mapping[str, Any] | None = None,
        invalid_reward: float = 0.0,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(identifier, kwargs)
        if self.settings:
            raise ValueError(f"it takes no {', '.join(self.settings)}")
        self.url = _websocket_url(identifier)
        self.schema = _action_schema(identifier)
        properties = self.schema.get("properties", {})
        self.action_fields = {
            name: field for name, field in properties.items() if name not in COMMON
        }
        self.fields = fields
        self.reset_arguments = dict(reset or {})
        self.invalid_reward = invalid_reward
        self.timeout_s = timeout_s
        self.row: dict[str, Any] = {}

    def reset(self, seed: int | None = None, **row: Any) -> Observation:
        """Starts the seed's episode; a dataset's columns go to the environment's reset."""
        self.row = row
        return super().reset(seed)

    def start(self, seed: int) -> str:
        """Resets the environment, on a new connection where there is none."""
        arguments = self.reset_arguments | self.row | {"seed": seed % SEEDS}
        if self.game is None or self.game.is_closed:
            self.game = _Connection(self.url, self.timeout_s)
        data = self.game.ask("reset", arguments)
        if data["done"]:
            raise RuntimeError(f"{self.url}: the environment has ended at its reset")
        return self.fill_prompt(
            observation=self._text_of(data["observation"]), action=self._how_to_act()
        )

    def play(self, action: str) -> Step:
        """Sends an action; what is none is answered here."""
        try:
            sent = self._read_action(action)
        except ValueError as error:
            return self._refuse(str(error))
        data = self.game.ask("step", sent)
        if "invalid" in data:
            return self._refuse(data["invalid"])
        reward = float(data["reward"] or 0.0)
        return self._text_of(data["observation"]), reward, data["done"], {"valid": True}

    def sample_action(self, generator: random.Random) -> str | None:
        """Returns an action drawn at random where the schema lists them; None where it does not."""
        drawn: dict[str, Any] = {}
        for name, field in self.action_fields.items():
            if "enum" in field:
                drawn[name] = generator.choice(field["enum"])
            elif field.get("type") == "boolean":
                drawn[name] = generator.random() < 0.5
            elif field.get("type") == "integer" and {"minimum", "maximum"} <= field.keys():
                drawn[name] = generator.randint(field["minimum"], field["maximum"])
            else:
                return None
        if self._takes_text:
            return str(next(iter(drawn.values())))
        return json.dumps(drawn)

    @property
    def _takes_text(self) -> bool:
        """Returns whether an action is a single text."""
        kinds = [field.get("type") for field in self.action_fields.values()]
        return kinds == ["string"]

    def _how_to_act(self) -> str:
        """Says how an action is written."""
        described = {
            name: {key: field[key] for key in ("type", "enum", "description") if key in field}
            for name, field in self.action_fields.items()
        }
        if not self._takes_text:
            return f"Answer with a JSON object with these fields: {json.dumps(described)}"
        ((name, field),) = self.action_fields.items()
        choices = f", one of: {', '.join(map(str, field['enum']))}" if "enum" in field else ""
        about = f" ({field['description']})" if "description" in field else ""
        return f"Answer with the {name.replace('_', ' ')}{about}{choices}."

    def _read_action(self, text: str) -> dict[str, Any]:
        """Makes the environment's action of an answer; ValueError says what is wrong with it."""
        if self._takes_text:
            action: Any = dict.fromkeys(self.action_fields, text)
        else:
            action = _json_in(text)
            if not isinstance(action, dict) and len(self.action_fields) == 1:
                action = dict.fromkeys(self.action_fields, action)
        validator = jsonschema.Draft202012Validator(self.schema)
        error = next(validator.iter_errors(action), None)
        if error is not None:
            raise ValueError(cut_middle(error.message, MAX_ERROR_CHARS))
        return action

    def _refuse(self, why: str) -> Step:
        text = f"That is no action: {why}. {self._how_to_act()}"
        return text, self.invalid_reward, False, {"valid": False}

    def _text_of(self, observation: Mapping[str, Any]) -> str:
        """Writes an observation: a single text as it is, else a line a field."""
        shown = {
            name: value
            for name, value in observation.items()
            if (name in self.fields if self.fields is not None else name not in COMMON)
        }
        missing = [name for name in self.fields or () if name not in observation]
        if missing:
            raise ValueError(
                f"observations have no {', '.join(missing)}; they have: {', '.join(observation)}"
            )
        if len(shown) == 1:
            (value,) = shown.values()
            return _as_text(value)
        return "\n".join(f"{name}: {_as_text(value)}" for name, value in shown.items())


class _Connection:
    """Holds one session of a server's. Raises ConnectionError where it breaks."""

    def __init__(self, url: str, timeout_s: float | None) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.is_closed = False
        try:
            self.socket: ClientConnection = connect(
                url, open_timeout=CONNECT_S, close_timeout=1.0, max_size=MAX_MESSAGE_BYTES
            )
        except (OSError, InvalidHandshake, InvalidMessage, TimeoutError) as error:
            raise ConnectionError(f"{url} cannot be reached: {error}") from None

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the data of the observation that answers it.

        Returns {"invalid": why} where the server refused an action.
        """
        try:
            # Behind what the server said before it closed, the next line raises the same.
            with suppress(ConnectionClosed):
                self._drop_unasked()
                self.socket.send(json.dumps({"type": kind, "data": data}, default=str))
            reply = self._receive(kind)
        except ConnectionClosed as error:
            self.is_closed = True
            raise ConnectionError(f"{self.url} closed the connection in {kind}: {error}") from None
        except BaseException:
            # A reply that comes later would be taken for the next one's.
            self.close()
            raise
        return self._read(kind, reply)

    def _drop_unasked(self) -> None:
        """Drops what came to no request: it would be taken for the next one's reply."""
        with suppress(TimeoutError):
            for _ in range(MAX_DROPPED):
                self.socket.recv(timeout=0)
                logger.warning("%s sent a message that nobody asked for: it is dropped", self.url)
            raise RuntimeError(f"{self.url} sent {MAX_DROPPED} messages that nobody asked for")

    def _receive(self, kind: str) -> str | bytes:
        """Waits for a message in short looks, so that a deadline of the pool's can end it."""
        begun_at = time.monotonic()
        while True:
            try:
                return self.socket.recv(timeout=LOOK_S)
            except TimeoutError:
                waited_s = time.monotonic() - begun_at
                if self.timeout_s is not None and waited_s > self.timeout_s:
                    raise TimeoutError(
                        f"{self.url} did not answer {kind} within {self.timeout_s:g} s"
                    ) from None

    def _read(self, kind: str, reply: str | bytes) -> dict[str, Any]:
        """Reads a message of the server's; RuntimeError where it is an error or none."""
        try:
            message = json.loads(reply)
            data = message["data"]
            if message["type"] == "error":
                return self._read_error(kind, data)
            well_formed = (
                message["type"] == "observation"
                and isinstance(data["observation"], dict)
                and isinstance(data["reward"], float | int | None)
                and isinstance(data["done"], bool)
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            well_formed = False
        if well_formed:
            return data
        self.close()
        raise RuntimeError(
            f"{self.url} answered {kind} with {cut_middle(str(reply), MAX_ERROR_CHARS)!r}, which "
            f"is no observation as {VERSIONS} sends it"
        )

    def _read_error(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        code = data.get("code")
        said = cut_middle(str(data.get("message")), MAX_ERROR_CHARS)
        if code == "VALIDATION_ERROR" and kind == "step":
            faults = [str(fault.get("msg")) for fault in data.get("errors", [])]
            return {"invalid": cut_middle("; ".join(faults) or said, MAX_ERROR_CHARS)}
        self.close()
        if code == "CAPACITY_REACHED":
            said += (
                "; start the server with more sessions (max_concurrent_envs), or play fewer "
                "episodes at once (agent.environment.num_workers)"
            )
        raise RuntimeError(f"{self.url} failed in {kind}: {code}: {said}")

    def close(self) -> None:
        """Ends the session."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self.socket.send('{"type": "close"}')
            self.socket.close()
        except (OSError, ConnectionClosed):
            return


def _websocket_url(url: str) -> str:
    """Returns the address of the server's WebSocket. ValueError where it is no URL."""
    parts = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ValueError(f"{url} is no URL; it is written as in openenv:http://127.0.0.1:8000")
    path = parts.path.removesuffix("/").removesuffix("/ws")
    return urlunsplit((schemes[parts.scheme], parts.netloc, f"{path}/ws", parts.query, ""))


def _action_schema(url: str) -> dict[str, Any]:
    """Asks the server for the schema of its actions.

    Raises:
        ValueError: it is not there, or speaks another protocol.
    """
    address = _websocket_url(url).replace("ws", "http", 1).removesuffix("/ws")
    try:
        answer = httpx.get(f"{address}/schema", timeout=CONNECT_S)
    except httpx.HTTPError as error:
        raise ValueError(f"{url} cannot be reached: {type(error).__name__}: {error}") from None
    try:
        schema = answer.raise_for_status().json()["action"]
        jsonschema.Draft202012Validator.check_schema(schema)
        _ = schema["properties"]
    except (httpx.HTTPError, ValueError, TypeError, KeyError, jsonschema.SchemaError):
        raise ValueError(
            f"{url}/schema answers {answer.status_code} and no schema of actions: it is no server "
            f"of {VERSIONS}, whose protocol is wanted"
        ) from None
    return schema


def _json_in(text: str) -> Any:
    """Returns the JSON value that a text is, or the first object in it; ValueError without one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
    raise ValueError("there is no JSON in it")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
