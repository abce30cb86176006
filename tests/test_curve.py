"""A pool with keys: who has them is served from anywhere, who has others is told at once, and the wire shows nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from aio_help import run_on
from conftest import ENGINEPOOL, Serve, Served, wait_for
from relay import Relay

from enginepool import AsyncPool, NoDispatcher, Pool, SamplingParams, SettingsError
from enginepool.client.connection import Connection
from enginepool.errors import ExitCode
from enginepool.keys import read_client_keys
from enginepool.make_keys import make_keys
from enginepool.protocol import PROTOCOL_VERSION, Hello, Message, Ping, Rejected, Welcome, decode_to_client, encode
from enginepool.transport import Dealer

FIVE = SamplingParams(max_tokens=5)
PROMPT = "the prompt that nobody shall read " * 4


class Keyed(NamedTuple):
    """A served pool that wants keys, and the two files; the run directory is not the tests' own, as on another machine."""

    served: Served
    port: int
    pool_file: Path
    client_file: Path
    run_dir: Path

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    files = make_keys(folder / "keys")
    served = Served(
        *("--engine", "echo", "--endpoint", "tcp://0.0.0.0:0", "--keys", str(files[0])), env={"ENGINEPOOL_RUN_DIR": str(folder / "run")}
    )
    port = int(json.loads(served.ready_line())["endpoint"].rpartition(":")[2])
    yield Keyed(served, port, *files, folder / "run")
    served.end()


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's file of another pool."""
    return make_keys(tmp_path_factory.mktemp("other") / "keys")[1]


def _mixed(keyed: Keyed, other: Path, folder: Path, *names: str) -> Path:
    """A client's file with some lines of another pool's."""
    lines = {line.partition(" ")[0]: line for line in other.read_text().splitlines()}
    text = "\n".join(
        lines[name] if (name := line.partition(" ")[0]) in names else line for line in keyed.client_file.read_text().splitlines()
    )
    path = folder / "mixed.keys"
    path.touch(0o600)
    path.write_text(text)
    return path


def _own_address() -> str | None:
    """An address of this machine that is not loopback."""
    found = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses if address.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), None)


def _ask(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ENGINEPOOL, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | env)


def _answer(dealer: Dealer) -> Message:
    deadline = time.monotonic() + 10
    while (frames := dealer.receive()) is None:
        assert time.monotonic() < deadline, "no answer"
        dealer.wait(0.1)
    return decode_to_client(frames[0])


# With the right keys.


def test_client_with_keys_is_served(keyed: Keyed) -> None:
    with Pool.connect(keyed.endpoint, keys=keyed.client_file) as pool:
        assert pool.generate(PROMPT, FIVE).text == PROMPT[:5]
        assert [output.text for output in pool.generate_many(["a", "b"] * 50, FIVE)] == ["aaaaa", "bbbbb"] * 50
        assert pool.endpoint == keyed.endpoint


@pytest.mark.skipif(_own_address() is None, reason="this machine has no address but loopback")
def test_client_with_keys_is_served_at_the_machines_own_address(keyed: Keyed) -> None:
    with Pool.connect(f"tcp://{_own_address()}:{keyed.port}", keys=str(keyed.client_file)) as pool:
        assert pool.generate("hello", FIVE).text == "hello"


def test_client_on_an_event_loop_with_keys_is_served(keyed: Keyed) -> None:
    async def main() -> str | None:
        async with AsyncPool.connect(keyed.endpoint, keys=keyed.client_file) as pool:
            return (await pool.generate("hello", FIVE)).text

    assert run_on("asyncio", main()) == "hello"


def test_handle_takes_the_path_of_the_keys_along_and_no_key(keyed: Keyed) -> None:
    with Pool.connect(keyed.endpoint, keys=keyed.client_file) as pool:
        data = pickle.dumps(pool)
    assert str(keyed.client_file).encode() in data
    keys = read_client_keys(keyed.client_file)
    for key in (keys.secret, keys.client_secret):
        assert key not in data
        assert key.hex().encode() not in data
    handle: Pool = pickle.loads(data)
    with handle:
        assert handle.generate("hello", FIVE).text == "hello"


def test_handle_of_relative_keys_works_in_another_folder(keyed: Keyed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(keyed.client_file.parent)
    with Pool.connect(keyed.endpoint, keys="client.keys") as pool:
        data = pickle.dumps(pool)
    monkeypatch.chdir(tmp_path)
    handle: Pool = pickle.loads(data)
    with handle:
        assert handle.generate("hello", FIVE).ok


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_commands_take_keys(keyed: Keyed, way: str) -> None:
    given = {"flag": ("--endpoint", keyed.endpoint, "--keys", str(keyed.client_file)), "environment": ()}[way]
    env = {} if given else {"ENGINEPOOL_ENDPOINT": keyed.endpoint, "ENGINEPOOL_KEYS": str(keyed.client_file)}
    done = _ask("status", "--json", *given, **env)
    assert json.loads(done.stdout)["pid"] == keyed.served.pid


def test_keys_in_the_environment_do_not_disturb_an_ipc_pool(keyed: Keyed, monkeypatch: pytest.MonkeyPatch, echo_pool: Pool) -> None:
    monkeypatch.setenv("ENGINEPOOL_KEYS", str(keyed.client_file))
    with Pool.connect(echo_pool.endpoint) as pool:
        assert pool.generate("hello", FIVE).ok


def test_embedded_pool_with_keys_serves_its_program_and_others(tmp_path: Path, fresh_run_dir: Path) -> None:
    pool_file, client_file = make_keys(tmp_path / "keys")
    with Pool(engine="echo", workers=1, endpoint="tcp://0.0.0.0:0", keys=pool_file) as pool:
        assert pool.generate("hello", FIVE).text == "hello"
        assert pool._connection.way.is_local
        port = pool.endpoint.rpartition(":")[2]
        with Pool.connect(f"tcp://localhost:{port}", keys=client_file) as other:
            assert not other._connection.way.is_local
            assert other.pool_id == pool.pool_id
    assert list(fresh_run_dir.iterdir()) == []


def test_drain_and_stop_by_a_client_with_keys(serve: Serve, tmp_path: Path) -> None:
    pool_file, client_file = make_keys(tmp_path / "keys")
    for command in ("drain", "stop"):
        served = serve("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0", "--keys", str(pool_file))
        endpoint = json.loads(served.ready_line())["endpoint"]
        done = _ask(command, "--endpoint", endpoint, "--keys", str(client_file), ENGINEPOOL_RUN_DIR=str(tmp_path))
        assert (done.returncode, done.stderr.splitlines()[-1]) == (ExitCode.OK, "stopped")
        assert served.finish()[0] == ExitCode.OK


# With others, or with none.


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        pytest.param(
            ["server_public", "client_public", "client_secret", "secret"],
            r"these keys are not for this pool \(another server_public\)",
            id="all",
        ),
        pytest.param(["server_public"], r"these keys are not for this pool \(another server_public\)", id="server-key"),
        pytest.param(
            ["client_public", "client_secret"], r"does not know this client's key; give the client\.keys that was made", id="client-key"
        ),
        pytest.param(["secret"], "the secret is not this pool's", id="secret"),
    ],
)
def test_client_with_other_keys_is_told_within_seconds(keyed: Keyed, other_keys: Path, tmp_path: Path, lines: list[str], told: str) -> None:
    began = time.monotonic()
    with pytest.raises(NoDispatcher, match=told):
        Pool.connect(keyed.endpoint, keys=_mixed(keyed, other_keys, tmp_path, *lines))
    assert time.monotonic() - began < 3


def test_client_on_an_event_loop_with_other_keys_is_told(keyed: Keyed, other_keys: Path) -> None:
    async def main() -> None:
        async with AsyncPool.connect(keyed.endpoint, keys=other_keys):
            pass

    with pytest.raises(NoDispatcher, match="these keys are not for this pool"):
        run_on("asyncio", main())


def test_command_with_other_keys_is_told(keyed: Keyed, other_keys: Path) -> None:
    done = _ask("status", "--endpoint", keyed.endpoint, "--keys", str(other_keys))
    assert done.returncode == ExitCode.NO_DISPATCHER
    assert done.stderr.startswith(f"enginepool status: the pool at {keyed.endpoint} does not let this client in: ")
    assert len(done.stderr.splitlines()) == 1


def test_client_without_keys_on_the_pools_machine_is_told(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINEPOOL_RUN_DIR", str(keyed.run_dir))
    with pytest.raises(NoDispatcher, match=r"it wants keys; give the client\.keys that belong to it"):
        Pool.connect(f"tcp://0.0.0.0:{keyed.port}")


def test_client_without_keys_elsewhere_is_told_before_it_connects() -> None:
    with pytest.raises(SettingsError, match=r"a pool beyond loopback wants keys; give the client\.keys"):
        Pool.connect("tcp://gpu-box:5555")


def test_client_with_keys_to_a_pool_without_is_told(keyed: Keyed) -> None:
    with (
        Pool(engine="echo", workers=1, endpoint="tcp://127.0.0.1:0") as pool,
        pytest.raises(NoDispatcher, match=r"it uses no keys; leave them out|or it uses none"),
    ):
        Pool.connect(pool.endpoint, keys=keyed.client_file)


def test_keys_for_an_ipc_pool_are_refused(keyed: Keyed, echo_pool: Pool) -> None:
    with pytest.raises(SettingsError, match="keys are for tcp"):
        Pool.connect(echo_pool.endpoint, keys=keyed.client_file)


def test_client_where_nothing_listens_is_told(keyed: Keyed) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(NoDispatcher, match="does not answer; nothing listens there, its name is not known, or a firewall"):
        Connection(f"tcp://127.0.0.1:{port}", 0.3, keys=keyed.client_file)


def test_client_where_something_mute_listens_is_told(keyed: Keyed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(NoDispatcher, match="something listens there, but"):
        Connection(f"tcp://127.0.0.1:{mute.getsockname()[1]}", 0.3, keys=keyed.client_file)


@pytest.mark.parametrize(
    "greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 8, b"SSH-2.0-OpenSSH_9.6\r\n"], ids=["closes", "http", "ssh"]
)
def test_client_where_another_program_listens_is_told(keyed: Keyed, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            try:
                while True:
                    one, _ = other.accept()
                    with one:
                        one.sendall(greeting)
                        one.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            with pytest.raises(NoDispatcher, match=r"another program|something else listens there"):
                Connection(f"tcp://127.0.0.1:{other.getsockname()[1]}", keys=keyed.client_file)
        finally:
            other.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_refused_keys_are_told_in_the_log_without_flooding_it(serve: Serve, tmp_path: Path) -> None:
    pool_file, client_file = make_keys(tmp_path / "keys")
    other_file = make_keys(tmp_path / "other")[1]
    served = serve("--engine", "echo", "--endpoint", "tcp://127.0.0.1:0", "--keys", str(pool_file))
    endpoint = json.loads(served.ready_line())["endpoint"]
    keyed = Keyed(served, 0, pool_file, client_file, tmp_path)
    mixed = _mixed(keyed, other_file, tmp_path, "client_public", "client_secret")
    for _ in range(5):
        with pytest.raises(NoDispatcher):
            Connection(endpoint, keys=mixed)
    with Pool.connect(endpoint, keys=client_file) as pool:
        assert pool.generate("hello", FIVE).ok
    served.process.terminate()
    _, stderr = served.finish()
    assert stderr.count("refused a client at 127.0.0.1: its key is not known") == 1


# What the wire shows.


def test_wire_shows_neither_prompts_nor_secrets(keyed: Keyed) -> None:
    with Relay(keyed.port) as relay, Pool.connect(relay.endpoint, keys=keyed.client_file) as pool:
        assert pool.generate(PROMPT, SamplingParams(max_tokens=len(PROMPT))).text == PROMPT
        wire = bytes(relay.sent + relay.answered)
    assert len(wire) > 2 * len(PROMPT)
    keys = read_client_keys(keyed.client_file)
    for hidden in (b"prompt", b"Hello", b"Submit", keys.secret, keys.client_secret, keys.client_public):
        assert hidden not in wire


OLD_GREETINGS = {
    "unversioned": b"\x01\x00",
    "version-1": b"\xff" + bytes(8) + b"\x7f\x00\x06\x00\x00",
    "version-2": b"\xff" + bytes(8) + b"\x7f\x01\x06\x00\x00",
    "version-3-without-encryption": b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48),
}


def _heard_by(greeting: bytes, keys: Path | None) -> bytes:
    """What a server that greets like this hears of a client that has something to say."""
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dealer = Dealer(f"tcp://127.0.0.1:{server.getsockname()[1]}", keys=None if keys is None else read_client_keys(keys))
        dealer.send([b"in the clear"])
        peer, _ = server.accept()
        with peer:
            peer.sendall(greeting)
            peer.settimeout(0.3)
            with suppress(TimeoutError, ConnectionResetError):
                while data := peer.recv(65536):
                    heard += data
        dealer.close(0)
    return heard


@pytest.mark.parametrize("greeting", OLD_GREETINGS.values(), ids=OLD_GREETINGS)
def test_client_with_keys_says_nothing_in_the_clear(keyed: Keyed, greeting: bytes) -> None:
    """Whoever sits between could pretend to be an older pool, or one without encryption."""
    assert b"in the clear" not in _heard_by(greeting, keyed.client_file)


def test_client_without_keys_would_have_said_it() -> None:
    assert b"in the clear" in _heard_by(OLD_GREETINGS["version-2"], None)


def test_wire_without_keys_shows_the_prompt(keyed: Keyed) -> None:
    """What the test above looks for would be found."""
    with Pool(engine="echo", workers=1, endpoint="tcp://127.0.0.1:0") as pool:
        dealer_port = int(pool.endpoint.rpartition(":")[2])
        secret = pool._connection.way.secret
        with Relay(dealer_port) as relay:
            dealer = Dealer(relay.endpoint)
            dealer.send([encode(Hello(PROTOCOL_VERSION, secret, uuid.uuid4().bytes, os.getpid()))])
            assert isinstance(_answer(dealer), Welcome)
            dealer.close(0)
            assert b"Hello" in relay.sent
            assert secret in relay.sent


def test_replayed_connection_gets_nowhere(keyed: Keyed) -> None:
    with Relay(keyed.port) as relay, Pool.connect(relay.endpoint, keys=keyed.client_file) as pool:
        pool.generate("hello", FIVE)
        recorded = bytes(relay.sent)
    with Pool.connect(keyed.endpoint, keys=keyed.client_file) as pool:
        wait_for(lambda: pool.status().clients == 1, "the goodbye of the recorded client")
        finished = pool.status().finished
        with socket.create_connection(("127.0.0.1", keyed.port), 10) as replay:
            replay.sendall(recorded)
            answer = b"".join(iter(lambda: replay.recv(65536), b""))
        assert b"Welcome" not in answer
        assert (pool.status().clients, pool.status().finished) == (1, finished)


def test_hello_with_the_client_id_of_another_connection_is_refused(keyed: Keyed) -> None:
    keys = read_client_keys(keyed.client_file)
    hello = encode(Hello(PROTOCOL_VERSION, keys.secret, uuid.uuid4().bytes, None))
    first, second = (Dealer(keyed.endpoint, keys=keys) for _ in range(2))
    try:
        first.send([hello])
        assert isinstance(_answer(first), Welcome)
        second.send([hello])
        refusal = _answer(second)
        assert isinstance(refusal, Rejected)
        assert "another connection has this client_id" in refusal.reason
        first.send([hello])  # the same again, from the same connection, begins anew
        assert isinstance(_answer(first), Welcome)
        second.send([encode(Ping(1))])
        assert isinstance(_answer(second), Rejected)
    finally:
        first.close(0)
        second.close(0)


# Serving.


FAR = ("--endpoint", "tcp://0.0.0.0:0")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Keys files by what is wrong with them."""
    pool_file, client_file = make_keys(tmp_path / "keys")
    paths = {name: tmp_path / name for name in ("open", "torn", "nowhere")}
    for name, text in (("open", pool_file.read_text()), ("torn", pool_file.read_text()[:200])):
        paths[name].touch(0o600)
        paths[name].write_text(text)
    paths["open"].chmod(0o644)
    return {"pool": str(pool_file), "client": str(client_file)} | {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("endpoint", "keys", "told"),
    [
        pytest.param("tcp://0.0.0.0:0", None, r"make them \(enginepool keys FOLDER\)", id="far-without-keys"),
        pytest.param(None, "pool", "keys are for tcp", id="keys-for-ipc"),
        pytest.param("tcp://0.0.0.0:0", "client", r"it is a client's; the pool needs the pool\.keys", id="keys-of-a-client"),
        pytest.param("tcp://0.0.0.0:0", "open", "chmod 600", id="keys-open-to-others"),
        pytest.param("tcp://0.0.0.0:0", "torn", "copy it anew", id="keys-torn"),
        pytest.param("tcp://0.0.0.0:0", "nowhere", "No such file", id="keys-missing"),
        pytest.param("tcp://gpu-box:0", "pool", "listens at a numeric IPv4 address", id="name"),
        pytest.param("tcp://[::]:0", "pool", "IPv6 is not supported", id="ipv6"),
        pytest.param("tcp://198.51.100.7:0", "pool", "Cannot assign requested address", id="another-machines-address"),
    ],
)
def test_serve_and_doctor_refuse_a_bad_endpoint_or_bad_keys(
    serve: Serve, files: dict[str, str], endpoint: str | None, keys: str | None, told: str
) -> None:
    arguments = ["--engine", "echo", *(["--endpoint", endpoint] if endpoint else []), *(["--keys", files[keys]] if keys else [])]
    code, stderr = serve(*arguments).finish()
    assert code == ExitCode.USAGE
    assert re.search(told, stderr)
    assert len(stderr.strip().splitlines()) == 1
    doctor = _ask("doctor", "--json", *arguments)
    report = json.loads(doctor.stdout)
    assert doctor.returncode == report["exit_code"] == code
    assert [finding["topic"] for finding in report["findings"] if finding["level"] == "error"] == ["endpoint"]


def test_doctor_finds_good_keys_good(files: dict[str, str]) -> None:
    done = _ask("doctor", "--engine", "echo", *FAR, "--keys", files["pool"])
    assert done.returncode == 0, done.stdout
    assert "endpoint: tcp://0.0.0.0:0 is free; clients need the keys" in done.stdout


def test_doctor_sees_a_port_that_is_taken_at_one_address(files: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://0.0.0.0:{taken.getsockname()[1]}"
        done = _ask("doctor", "--engine", "echo", "--endpoint", endpoint, "--keys", files["pool"])
    assert done.returncode == ExitCode.USAGE
    assert f"{endpoint} is in use by another program" in " ".join(done.stdout.split())
