"""Servers of saved folders: each in a process of its own on a free port, asked, and stopped."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(url: str, request: dict) -> str:
    """Returns the text of the answer."""
    body = urllib.request.Request(url, json.dumps(request).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(body, timeout=240) as answer:
        return answer.read().decode()


def wait_until_healthy(address: str, server: subprocess.Popen, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert server.poll() is None, log.read_text()[-8000:]
        assert time.monotonic() < deadline, log.read_text()[-8000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)


@contextmanager
def serving(
    command: list[str], folder: Path, env: dict[str, str] | None = None, seconds: float = 240
) -> Iterator[str]:
    """Runs a command with a free `--port` in a folder, and yields its address once it answers."""
    port, log = free_port(), folder / "log.txt"
    address = f"http://127.0.0.1:{port}"
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    given = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, **given) as server:
        try:
            wait_until_healthy(address, server, log, seconds)
            yield address
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
