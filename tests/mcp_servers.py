"""MCP servers for tests: a good one, written with the official package, and bad ones by hand.

python mcp_servers.py counter             # over standard input and output
python mcp_servers.py counter PORT        # streamable HTTP
python mcp_servers.py FAULT               # a bad one
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

FAULTS = (
    "silent",
    "exits",
    "hangs_in_calls",
    "floods_a_line",
    "floods_lines",
    "garbage",
    "dies_in_calls",
    "huge_result",
    "deaf",
    "bad_schema",
    "endless_list",
)


def make_counter() -> Any:
    """A server that remembers a number, and can fail in a few ways."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("counter")
    counted = [0]

    @server.tool(description="Adds to the number and returns it.")
    def add(amount: int) -> str:
        counted[0] += amount
        return str(counted[0])

    @server.tool(description="Fails.")
    def fail(reason: str) -> str:
        raise ToolError(reason)

    @server.tool(description="Sleeps.")
    async def sleep(seconds: float) -> str:
        import anyio

        await anyio.sleep(seconds)
        return "rested"

    @server.tool(description="Shows a variable of the environment.")
    def variable(name: str) -> str:
        return os.environ.get(name, "none")

    @server.tool(description="Starts a process that outlives its caller; returns its id.")
    def leave_behind() -> str:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        return str(subprocess.Popen(command, start_new_session=True).pid)

    return server


def tool(name: str, schema: Any = None) -> dict[str, Any]:
    return {"name": name, "inputSchema": schema or {"type": "object"}}


def answer(message: dict[str, Any], fault: str) -> dict[str, Any] | None:
    """What a bad server answers to a message, if it does."""
    method = message["method"]
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        info = {"name": fault, "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list" and fault == "bad_schema":
        return {"tools": [tool("act", {"type": "object", "properties": {"x": {"type": "no"}}})]}
    if method == "tools/list" and fault == "endless_list":
        return {"tools": [tool(f"act{time.monotonic_ns()}")], "nextCursor": "more"}
    if method == "tools/list":
        return {"tools": [tool("act")]}
    if method == "tools/call" and fault == "huge_result":
        return {"content": [{"type": "text", "text": "x" * (4 * 2**20)}]}
    return {"content": [{"type": "text", "text": "done"}]}


def serve_badly(fault: str) -> None:
    """Speaks the protocol by hand, and goes wrong as told."""
    out = sys.stdout.buffer
    if fault == "exits":
        print("out of order", file=sys.stderr)
        sys.exit(3)
    for line in sys.stdin:
        message = json.loads(line)
        is_call = message.get("method") == "tools/call"
        if fault == "silent" or (is_call and fault == "hangs_in_calls"):
            continue
        if is_call and fault == "dies_in_calls":
            os._exit(4)
        if is_call and fault == "deaf":
            # Neither listens nor ends.
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        while is_call and fault == "floods_a_line":
            out.write(b'{"x": "' + b"y" * 2**20)
        while is_call and fault == "floods_lines":
            out.write(b'{"jsonrpc": "2.0", "method": "notifications/message"}\n' * 1000)
        if fault == "garbage":
            out.write(b"starting...\n\x00\xff\xfe\n{not json\n[]\n{}\n")
        if "id" in message:
            result = answer(message, fault)
            out.write(
                json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
            )
            out.write(b"\n")
        out.flush()


if __name__ == "__main__":
    if sys.argv[1] != "counter":
        serve_badly(sys.argv[1])
    elif len(sys.argv) == 2:
        make_counter().run("stdio")
    else:
        make_counter().run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
