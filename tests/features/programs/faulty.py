"""Programs that misbehave, each in its own way: `python faulty.py WAY`."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlparse

BASE = urlparse(os.environ["OPENAI_BASE_URL"])
SAID = [{"role": "user", "content": "Hello"}]
NOTHING_ELSE = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}


def post(path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(BASE.hostname, BASE.port)
    connection.request("POST", BASE.path + path, body, headers)
    response = connection.getresponse()
    return response.status, response.read()


def ask(text: str = "Hello", **more: object) -> str:
    body = {"messages": [{"role": "user", "content": text}], **more}
    status, answer = post("/chat/completions", json.dumps(body).encode())
    assert status == 200, answer
    return json.loads(answer)["choices"][0]["message"]["content"]


def well() -> None:
    task = json.loads(os.environ["TASK"])
    assert json.loads(sys.stdin.readline()) == task
    assert ask() == "Yes."
    print("some words before")
    print(json.dumps({"reward": task.get("pays", 1.0) + int(os.environ["SEED"]) * 0}))


def wants_a_call() -> None:
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    ask(tools=[{"type": "function", "function": function}], tool_choice="required")
    print(1.0)


def raises() -> None:
    ask()
    raise RuntimeError("no more of this")


def hangs() -> None:
    ask()
    time.sleep(1000)


def ignores_signals() -> None:
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
    hangs()


def kills_itself() -> None:
    ask()
    os.kill(os.getpid(), signal.SIGSEGV)


def floods() -> None:
    ask()
    line = "x" * 1000 + "\n"
    for _ in range(20_000):
        sys.stdout.write(line)
        sys.stderr.write(line)
    print(0.5)


def leaves_children() -> None:
    ask()
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "left-by-faulty"]
    subprocess.Popen(command, **NOTHING_ELSE)
    subprocess.Popen(command, start_new_session=True, **NOTHING_ELSE)
    # Two forks in a session of its own, with the pipes kept open and nothing in its environment.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, command, {})
        os._exit(0)
    print(1)


def launcher() -> int:
    """Returns the process behind this program's keeper, which is its parent."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def kills_its_launcher() -> None:
    ask()
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "left-without-launcher"]
    subprocess.Popen(command, start_new_session=True, **NOTHING_ELSE)
    os.kill(launcher(), signal.SIGKILL)
    hangs()


def looks_for_files() -> None:
    ask()
    # The last one is what lists them.
    print(len(os.listdir("/proc/self/fd")) - 1)


def forks_that_ask() -> None:
    ask()
    if os.fork() == 0:
        while True:
            ask("Still there?")
    print(1)


def stops_its_launcher() -> None:
    ask()
    os.kill(launcher(), signal.SIGSTOP)
    hangs()


def asks_whatever_it_hears() -> None:
    while True:
        post("/chat/completions", json.dumps({"messages": SAID}).encode())
        time.sleep(0.1)


def closes_early() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True})
    for _ in range(3):
        connection = socket.create_connection((BASE.hostname, BASE.port))
        head = f"POST {BASE.path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        connection.close()
    ask()
    print(1)


def sends_garbage() -> None:
    for body in (
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"messages": 3}',
        b'{"messages": []}',
        b"[" * 9000,
    ):
        status, answer = post("/chat/completions", body)
        assert status == 400 and b"error" in answer, (status, answer)
    for path in ("/nothing", "/../..", "/chat/completions/x", "/embeddings"):
        assert post(path, b"{}")[0] == 404
    status, answer = post("/chat/completions", json.dumps({"n": 2, "messages": []}).encode())
    assert status == 400 and b"n=2" in answer
    connection = socket.create_connection((BASE.hostname, BASE.port))
    connection.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
    connection.recv(1000)
    ask()
    print(1)


def sends_much() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]})
    status, answer = post("/chat/completions", body.encode())
    assert status == 400 and b"context_length_exceeded" in answer, (status, answer[:200])
    ask()
    print(1)


def says_no_reward() -> None:
    ask()
    print("I did well")


def asks_for_nothing() -> None:
    print(1)


def takes_memory() -> None:
    ask()
    print(len(bytearray(3 << 30)))


def opens_files() -> None:
    ask()
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(5000)]
    print(len(files))


def guesses_tokens() -> None:
    for path in ("/e/none/v1", "/e//v1", "/v1"):
        connection = http.client.HTTPConnection(BASE.hostname, BASE.port)
        connection.request("POST", f"{path}/chat/completions", b"{}")
        assert connection.getresponse().status == 401, path
    connection = http.client.HTTPConnection(BASE.hostname, BASE.port)
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    connection.request("GET", "/v1/models", headers=key)
    assert json.load(connection.getresponse())["data"][0]["id"] == "policy"
    ask()
    print(1)


def pays_turns() -> None:
    ask()
    status, _ = post("/reward", b'{"reward": 0.25}')
    assert status == 200
    body = json.dumps({"messages": [{"role": "user", "content": "More"}]}).encode()
    assert post("/chat/completions", body, **{"X-Reward": "0.5"})[0] == 200
    assert post("/reward", b'{"reward": "much"}')[0] == 400


def exits_with_3() -> None:
    ask()
    sys.exit(3)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
