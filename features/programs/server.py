"""The server that programs speak to: OpenAI's, Anthropic's and the token-in protocol.

    POST /e/TOKEN/v1/chat/completions ...   GET /e/TOKEN/v1/models   POST /e/TOKEN/reward

It listens on loopback, or where it is told to (`programs.host`), and belongs to the thread of
the pool. An episode is known by its token, in the path or as the key; everything else is refused.
Invariant: nothing that comes over a connection holds the server up or grows without a bound:
bodies, their time and connections (connections.py) have limits, and an error is told in the
protocol's own form.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from aiohttp import web

from custom.env_calls import check_reward
from features.programs.attempt import Attempt, Pending
from features.programs.connection_log import ConnectionLog
from features.programs.connections import IDLE_S, Connection, Connections
from features.programs.exchange import AskedCompletion, Json
from features.programs.protocols import ProtocolError, anthropic_messages, protocol_of
from features.programs.protocols.protocol import Protocol, check_depth, openai_error, too_long
from features.programs.side_models import ask_service, side_service_of
from workers.rollout.speaker import NOBODY, Speaker

logger = logging.getLogger(__name__)
# Bytes of a request: for each token of the longest row, and beside them.
BYTES_PER_TOKEN = 64
BYTES_BESIDE = 1 << 20
# As many bytes a token has in most texts.
BYTES_OF_A_WORD = 4
# The longest that a connection may take to send a request's body, in seconds.
BODY_S = 60.0
# Connections that may wait to be opened.
BACKLOG = 1024
# How often a stream that waits is sent a comment, so that nobody takes it for dead.
HEARTBEAT_S = 5.0
# How long a request waits for the next episode of a token that has one after another.
NEXT_EPISODE_S = 10.0
# Tokens of ended episodes that are told from unknown ones.
MAX_ENDED = 10_000
SHUTDOWN_S = 1.0
# Names the reward of the answer before a request.
REWARD_HEADER = "X-Reward"
# Names the agent that speaks, and its conversation, where there are several; clients that keep a
# session's requests together name it so.
AGENT_HEADER = "X-Agent"
CONVERSATION_HEADER = "X-Session-ID"
MAX_NAME_CHARS = 200
# A request of another form raises one of these where it is read.
UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ProgramServer:
    """Serves the attempts that are registered with it.

    Args:
        max_tokens: of the longest row.
        port: 0 is any that is free.
        host: the address to listen at.
        lasting_tokens: by which one episode after another is known.
    """

    def __init__(
        self,
        max_tokens: int,
        port: int = 0,
        host: str = "127.0.0.1",
        lasting_tokens: Collection[str] = (),
    ) -> None:
        self._lasting_tokens = lasting_tokens
        self.host = host
        self.port = port
        self.max_tokens = max_tokens
        self.max_bytes = BYTES_BESIDE + BYTES_PER_TOKEN * max_tokens
        self._attempts: dict[str, Attempt] = {}
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: Connections | None = None
        self._log = ConnectionLog(logger)

    async def start(self) -> None:
        """Begins to listen, at a free port."""
        application = web.Application(client_max_size=self.max_bytes)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            logger=self._log,
            shutdown_timeout=SHUTDOWN_S,
            keepalive_timeout=IDLE_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server)
        listening = self._listen()
        self.port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connections.accept, sock=listening)

    def _listen(self) -> socket.socket:
        """Opens the port; OSError says where that is not possible."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the server of programs cannot listen at {self.host}, port {self.port}: "
                f"{error.strerror}",
            ) from None

    async def stop(self) -> None:
        """Stops listening and closes every connection."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._log.tell_count()

    def url(self, token: str) -> str:
        """Returns where an attempt is served, without the protocols' `/v1`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/e/{token}"

    def register(self, attempt: Attempt) -> None:
        """Serves an attempt from here on."""
        self._attempts[attempt.token] = attempt

    def forget(self, attempt: Attempt) -> None:
        """Serves an attempt no more: whoever asks is told that it has ended."""
        if self._attempts.pop(attempt.token, None) is not None:
            self._ended.append(attempt.token)
        # A token that has one episode after another keeps what it will use again.
        if self._connections is not None and attempt.token not in self._lasting_tokens:
            self._connections.close_idle(attempt.token)

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        """Answers one request; whoever names no episode is heard once."""
        assert self._connections is not None
        with self._connections.answering(http.protocol) as connection:
            response = await self._respond(http, connection)
            if not connection.token:
                response.force_close()
            # All of it, before the connection counts as idle; the client may be gone.
            with contextlib.suppress(ConnectionError):
                await response.prepare(http)
                await response.write_eof()
        return response

    async def _respond(self, http: web.Request, connection: Connection) -> web.StreamResponse:
        """Makes the response to a request, or an error in its protocol's form."""
        assert self._connections is not None
        path = http.path.rstrip("/")
        protocol = protocol_of(path)
        write_error: Callable[[ProtocolError], Json] = openai_error
        if protocol is not None:
            write_error = protocol.write_error
        elif "/v1/messages" in path or "anthropic-version" in http.headers:
            write_error = anthropic_messages.write_error
        attempt = None
        try:
            attempt = await self._attempt_of(http)
            with paid_where_refused(http, attempt):
                self._connections.assign(connection, attempt.token)
            if path.endswith("/models") and http.method == "GET":
                return web.json_response(list_models(attempt))
            if "/v1/models/" in path and http.method == "GET":
                return web.json_response(model_entry(path.rpartition("/v1/models/")[2]))
            if path.endswith("/reward") and http.method == "POST":
                return await self._take_reward(http, attempt)
            if path.endswith("/end") and http.method == "POST" and attempt.spec.is_by_hand:
                return await self._end(http, attempt)
            if protocol is None or http.method != "POST":
                with paid_where_refused(http, attempt):
                    told = f"{http.method} {path} is not served here"
                    raise ProtocolError(told, "not_found", 404)
            return await self._complete(http, attempt, protocol)
        except ProtocolError as error:
            if attempt is not None:
                attempt.counts["http_errors"] += 1
            return web.json_response(write_error(error), status=error.status)

    async def _attempt_of(self, http: web.Request) -> Attempt:
        """Returns the attempt that the token in the path, or else the key, names."""
        place = http.path.split("/")
        if len(place) > 2 and place[1] == "e":
            token = place[2]
        else:
            scheme, _, bearer = http.headers.get("Authorization", "").partition(" ")
            token = http.headers.get("x-api-key", "")
            if scheme.lower() == "bearer" and bearer:
                token = bearer.strip()
        if token in self._lasting_tokens:
            # The episode before may just have ended, and the next one is about to begin.
            waits_until = asyncio.get_running_loop().time() + NEXT_EPISODE_S
            while token not in self._attempts and asyncio.get_running_loop().time() < waits_until:
                await asyncio.sleep(0.02)
        attempt = self._attempts.get(token)
        if attempt is not None:
            return attempt
        if token in self._ended:
            raise ProtocolError("this episode has ended", "episode_ended", 410)
        raise ProtocolError("no episode goes by this token", "unknown_token", 401)

    # Requests

    async def _complete(
        self, http: web.Request, attempt: Attempt, protocol: Protocol
    ) -> web.StreamResponse:
        """Has a request answered, and writes the answer."""
        with paid_where_refused(http, attempt) as reward:
            body = await self._body(http)
            content = read_object(body)
            service = side_service_of(content, attempt.spec.services)
            if service is None:
                asked = replace(read_request(protocol, content), speaker=speaker_of(http))
                pending = attempt.ask(asked, body, reward=reward)
            else:
                attempt.refuse_if_ended()
        if service is not None:
            # It asks for no turn: what it says of the last one stands by itself.
            if reward is not None:
                attempt.take_reward(reward, speaker=speaker_of(http), by_refused=True)
            return web.json_response(await ask_service(service, content, http.path))
        delivered = False
        try:
            if asked.stream:
                response = await self._stream(http, attempt, protocol, pending)
            else:
                answered = await attempt.answer_to(pending)
                response = web.json_response(protocol.write(asked, answered))
                await response.prepare(http)
                await response.write_eof()
            delivered = True
        except ProtocolError as error:
            # Nobody comes back for a refused request.
            delivered = error.status < 500
            raise
        finally:
            attempt.stop_listening(pending, delivered=delivered)
        return response

    async def _stream(
        self, http: web.Request, attempt: Attempt, protocol: Protocol, pending: Pending
    ) -> web.StreamResponse:
        """Streams an answer, all of whose events come once it is sampled; comments till then."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        waiting = asyncio.ensure_future(attempt.answer_to(pending))
        try:
            while not (await asyncio.wait({waiting}, timeout=HEARTBEAT_S))[0]:
                if not response.prepared:
                    await response.prepare(http)
                await response.write(b": still sampling\n\n")
        finally:
            if not waiting.done():
                waiting.cancel()
        try:
            answered = waiting.result()
            text = "".join(protocol.events(pending.asked, answered))
        except ProtocolError as error:
            if not response.prepared:
                raise
            # Its status has been sent.
            text = f"event: error\ndata: {json.dumps(protocol.write_error(error))}\n\n"
        if not response.prepared:
            await response.prepare(http)
        await response.write(text.encode())
        await response.write_eof()
        return response

    async def _end(self, http: web.Request, attempt: Attempt) -> web.Response:
        """Ends an episode that is played by hand; `reward`, if any, is what it earned."""
        try:
            said = json.loads(await self._body(http) or b"{}")
            reward = said.get("reward")
            attempt.leave(None if reward is None else check_reward(reward, "the program"))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(f'an end is {{}} or {{"reward": 1.0}}: {error}') from None
        return web.json_response({"ok": True})

    async def _take_reward(self, http: web.Request, attempt: Attempt) -> web.Response:
        """Takes the reward of an answer, by `id`, or of the last one that its speaker has had."""
        try:
            said = json.loads(await self._body(http))
            reward = check_reward(said["reward"], "the program")
            number = None
            if said.get("id") is not None:
                number = attempt.number_of(str(said["id"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolError(
                f'a reward is {{"reward": 1.0}}, with the answer\'s "id" or without: {error}'
            ) from None
        attempt.take_reward(reward, number, speaker=speaker_of(http))
        return web.json_response({"ok": True})

    async def _body(self, http: web.Request) -> bytes:
        """Reads a request's body, up to its bound and its deadline."""
        try:
            return await asyncio.wait_for(http.read(), BODY_S)
        except web.HTTPRequestEntityTooLarge:
            raise ProtocolError(
                too_long(
                    (http.content_length or self.max_bytes) // BYTES_OF_A_WORD,
                    self.max_tokens,
                    f"The request has more than {self.max_bytes} bytes, {BYTES_PER_TOKEN} for each "
                    "token that a row may have; its tokens are an estimate",
                ),
                "context_length_exceeded",
            ) from None
        except ConnectionError:
            raise ProtocolError("the connection was closed", "closed") from None
        except web.RequestPayloadError as error:
            raise unreadable(error) from None
        except TimeoutError:
            raise ProtocolError(f"no whole body within {BODY_S:g} s", "timeout", 408) from None


def read_object(body: bytes) -> Json:
    """Reads a request's body as JSON. Raises ProtocolError, whatever it is."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise unreadable(error) from None
    if not isinstance(content, dict):
        raise ProtocolError("the request must be a JSON object")
    check_depth(content)
    return content


def read_request(protocol: Protocol, content: Json) -> AskedCompletion:
    """Reads what a request asks for. Raises ProtocolError, whatever is in it."""
    try:
        return protocol.read(content)
    except ProtocolError:
        raise
    except UNREADABLE as error:
        raise unreadable(error) from None


def unreadable(error: Exception) -> ProtocolError:
    """Makes the error of a request that is of another form."""
    return ProtocolError(f"the request cannot be read: {type(error).__name__}: {error}")


def reward_header(http: web.Request) -> float | None:
    """Returns the reward that a request's header gives for the answer before it."""
    text = http.headers.get(REWARD_HEADER)
    if text is None:
        return None
    try:
        return check_reward(float(text), "the program")
    except ValueError:
        raise ProtocolError(f"{REWARD_HEADER}: {text!r} is no number") from None


@contextlib.contextmanager
def paid_where_refused(http: web.Request, attempt: Attempt) -> Iterator[float | None]:
    """Yields the reward in a request's header, and pays it where the request is refused in here."""
    reward = reward_header(http)
    try:
        yield reward
    except ProtocolError:
        if reward is not None:
            attempt.take_reward(reward, speaker=speaker_of(http), by_refused=True)
        raise


def speaker_of(http: web.Request) -> Speaker:
    """Returns who asks, as a request's headers name them."""
    agent = header_text(http, AGENT_HEADER)
    # Clients that name a session alone mean something of their own by it.
    if not agent:
        return NOBODY
    return Speaker(agent, header_text(http, CONVERSATION_HEADER))


def header_text(http: web.Request, name: str) -> str:
    """Returns a header that names somebody, which may hold bytes that are no text."""
    text = http.headers.get(name, "")
    return text.encode("utf-8", "replace").decode()[:MAX_NAME_CHARS]


def list_models(attempt: Attempt) -> Json:
    """Lists the models that a program may ask: the policy, and those beside it."""
    asked = [name for service in attempt.spec.services for name in service.names]
    entries = [model_entry(name) for name in ("policy", *asked)]
    return {"object": "list", "data": entries}


def model_entry(name: str) -> Json:
    """Describes a model, by OpenAI's fields and by Anthropic's; the policy answers by any name."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "trainer",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
