"""Where the server of programs listens: this machine alone, or an address that others reach."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil
import pytest

from features.programs.attempt import Deadlines
from features.programs.pool import ProgramPool
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import exit_of, play, program
from tests.features.programs.test_server import begin

SOLVE = Path(__file__).with_name("runs") / "programs/solve.py"
# One of the addresses for examples alone: no machine has it.
NOBODYS = "203.0.113.7"


def own_address() -> str:
    """An address of this machine that is not loopback's."""
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    pytest.skip("this machine has no address but loopback's")


def pool_at(host: str, *specs: ProgramSpec) -> ProgramPool:
    return ProgramPool(
        dict(enumerate(specs)), deadlines=Deadlines(step_s=30.0), max_tokens=4096, host=host
    )


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.seconds
def test_programs_ask_at_the_address_that_others_reach_and_at_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = own_address()
    # Nobody listens there; the machine's own exceptions stay.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    shown = "import os; print(os.environ['NO_PROXY'], os.environ['OPENAI_BASE_URL']); print(1)"
    specs = (
        ProgramSpec(command=(sys.executable, "-c", shown)),
        program("well"),
        ProgramSpec(function=f"{SOLVE}:branch"),
    )
    with pool_at(address, *specs) as pool:
        output = exit_of(play(pool, 0, 0)).record["output"]
        assert f",{address},example.org http://{address}:{pool._server.port}/e/" in output
        for key in (1, 2):
            exited = exit_of(play(pool, key, key))
            assert exited.failure == "", exited.error
        assert is_open(address, pool._server.port)
        assert not is_open("127.0.0.1", pool._server.port)


def test_the_default_is_reached_from_this_machine_alone() -> None:
    address = own_address()
    with pool_at("127.0.0.1", program("hangs")) as pool:
        begin(pool)
        assert is_open("127.0.0.1", pool._server.port)
        assert not is_open(address, pool._server.port)


def test_an_address_of_the_newer_protocol_is_written_in_brackets() -> None:
    if not socket.has_ipv6 or not any(
        entry.address == "::1" for entries in psutil.net_if_addrs().values() for entry in entries
    ):
        pytest.skip("this machine speaks no IPv6")
    with pool_at("::1", program("well")) as pool:
        exited = exit_of(play(pool))
        assert exited.failure == "", exited.error
        assert pool.url("x") == f"http://[::1]:{pool._server.port}/e/x"


def test_an_address_that_is_not_this_machines_is_told() -> None:
    with pytest.raises(OSError, match=f"cannot listen at {NOBODYS}, port 0: "):
        pool_at(NOBODYS, program("well"))
