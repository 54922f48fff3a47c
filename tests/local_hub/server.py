"""HTTP: requests as the routes see them, answers, and the server of an origin."""

import io
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from .access import User, token_of, user_of
from .errors import HubError
from .faults import Record


if TYPE_CHECKING:
    from .hub import LocalHub

logger = logging.getLogger(__name__)


@dataclass
class Answer:
    """What a route returns: a body in memory, or the bytes `start` to `end` (exclusive) of a file."""

    body: bytes | Path = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    start: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        whole = self.body.stat().st_size if isinstance(self.body, Path) else len(self.body)
        return (whole if self.end is None else self.end) - self.start

    def open(self) -> BinaryIO:
        file: BinaryIO = self.body.open("rb") if isinstance(self.body, Path) else io.BytesIO(self.body)
        file.seek(self.start)
        return file


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Answer(json.dumps(value).encode(), status, {**kind, **(headers or {})})


def error_answer(error: HubError) -> Answer:
    header = " ".join(error.message.split()).encode("ascii", "replace").decode()
    headers = {"X-Error-Message": header, **error.headers}
    if error.code:
        headers["X-Error-Code"] = error.code
    return json_answer(error.body, error.status, headers)


class Request(BaseHTTPRequestHandler):
    """A connection, which serves one request after the other."""

    server: "Server"
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    @property
    def hub(self) -> "LocalHub":
        return self.server.hub

    @property
    def user(self) -> User | None:
        return user_of(self.record.token, self.hub.tokens)

    def chunks(self) -> Iterator[bytes]:
        """Yields the body, in whichever of HTTP's two ways its length is told."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield from self._read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield from self._read(int(self.headers.get("Content-Length", 0)))
        self.has_body = False

    def _read(self, left: int) -> Iterator[bytes]:
        while left:
            chunk = self.rfile.read(min(left, self.fault.next_chunk(self.record.received)))
            if not chunk:
                raise ConnectionError("The client broke off")
            left -= len(chunk)
            self.record.received += len(chunk)
            yield chunk

    def body(self) -> bytes:
        return b"".join(self.chunks())

    def json(self) -> Any:
        try:
            return json.loads(self.body() or b"{}")
        except ValueError as error:
            raise HubError(400, f"Invalid JSON: {error}") from error

    def _route(self) -> Answer:
        for methods, pattern, function in self.server.routes:
            match = re.fullmatch(pattern, self.path_only)
            if match and self.command in methods.split():
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                return function(self, **groups)
        raise HubError(404, f"No such endpoint: {self.command} {self.path_only}")

    def _answer(self) -> Answer:
        try:
            self.fault.before()
            answer = self._route()
        except HubError as error:
            answer = error_answer(error)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            logger.exception("%s %s", self.command, self.path)
            answer = json_answer({"error": f"Bug of the local Hub: {error!r}"}, 501)  # which nobody retries
        self.fault.answered()
        return answer

    def _send(self, answer: Answer) -> None:
        left = answer.size
        self.record.status = answer.status
        self.send_response(answer.status)
        for name, value in {"Content-Length": str(left), **answer.headers}.items():
            self.send_header(name, value)
        if self.has_body:  # nobody has read it, and no request can follow on this connection
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        with answer.open() as file:
            while left:
                chunk = file.read(min(left, self.fault.next_chunk(answer.size - left)))
                self.wfile.write(chunk)
                self.wfile.flush()
                left -= len(chunk)

    def respond(self) -> None:
        parts = urlsplit(self.path)
        self.path_only = parts.path
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.has_body = "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"
        self.fault = self.hub.fault_for(self.command, self.path_only)
        token = token_of(self.headers)
        self.record = Record(self.command, self.path, self.server.is_storage, token)
        self.hub.log.append(self.record)
        try:
            self._send(self._answer())
        except (ConnectionError, TimeoutError):  # the client went away, or a fault dropped it
            self.close_connection = True
        logger.info("%s %s %d", self.command, self.path, self.record.status)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = respond

    def log_message(self, *args: object) -> None:
        """Leaves logging to `respond`."""


Route = tuple[str, str, Callable[..., Answer]]  # methods, regular expression of the path, function


class Server(ThreadingHTTPServer):
    """An origin on 127.0.0.1; `stop` also ends the connections that clients keep open."""

    daemon_threads = True

    def __init__(self, hub: "LocalHub", port: int, routes: tuple[Route, ...], is_storage: bool):
        self.hub = hub
        self.routes = routes
        self.is_storage = is_storage
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Request)

    @property
    def url(self) -> str:
        # huggingface_hub 1 tells origins apart by their host alone
        host = "localhost" if self.is_storage else "127.0.0.1"
        return f"http://{host}:{self.server_port}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in tuple(self._connections):
            self.shutdown_request(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("%s broke off", client_address, exc_info=True)
