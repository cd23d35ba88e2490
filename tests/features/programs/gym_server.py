"""A resource server in NeMo Gym's form: sums whose first number a tool knows.

`python gym_server.py FOLDER` serves; it writes FOLDER/port, and FOLDER/rows.jsonl for the taskset
`nemo_gym` of verifiers.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOOK = {
    "type": "function",
    "name": "look",
    "description": "Tells the secret number.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    "strict": False,
}
ROWS = 6


class Resource(BaseHTTPRequestHandler):
    """Answers what NeMo Gym's servers answer: seed_session, a tool's name, verify."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {
            "/seed_session": dict,
            "/look": lambda: {"secret": 4},
            "/verify": lambda: verify(body),
        }[self.path]()
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def verify(body: dict[str, Any]) -> dict[str, Any]:
    """Pays half a point for a call of the tool, half for the right sum in the last message."""
    output = body["response"]["output"]
    has_looked = any(item["type"] == "function_call" for item in output)
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    is_right = bool(texts) and str(4 + body["number"]) in texts[-1]
    return {
        "reward": has_looked / 2 + is_right / 2,
        "has_looked": has_looked,
        "responses_create_params": {},
        "response": {},
    }


def write_rows(path: Path) -> None:
    """Writes the taskset's rows."""
    rows = []
    for number in range(ROWS):
        message = {"role": "user", "content": f"What is the secret number plus {number}?"}
        params = {"input": [message], "tools": [LOOK]}
        rows.append(json.dumps({"responses_create_params": params, "number": number}))
    path.write_text("\n".join(rows))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_rows(folder / "rows.jsonl")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Resource)
    (folder / "port.tmp").write_text(str(server.server_address[1]))
    (folder / "port.tmp").rename(folder / "port")
    server.serve_forever()
