"""An endpoint has one holder at a time, what a dead pool left behind disturbs nobody, and no other user gets in."""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginepool import rundir
from enginepool.errors import EndpointInUse, ExitCode, NoDispatcher, SettingsError
from enginepool.rundir import Claim, claim_endpoint, default_endpoint, make_run_dir, read_secret, run_dir


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"ENGINEPOOL_RUN_DIR": str(tmp_path / "run")}


@pytest.fixture
def claims() -> Iterator[list[Claim]]:
    """Claims to be released when the test is over."""
    held: list[Claim] = []
    yield held
    for claim in held:
        claim.release()


def _serve(claim: Claim) -> None:
    """Do what a dispatcher does after it has bound its two sockets."""
    for endpoint in (claim.endpoint, claim.back):
        Path(endpoint.removeprefix("ipc://")).touch()
    claim.publish(claim.endpoint)


def _mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# The run directory.


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        pytest.param({"ENGINEPOOL_RUN_DIR": "/a", "XDG_RUNTIME_DIR": "/b"}, "/a", id="own-variable"),
        pytest.param({"XDG_RUNTIME_DIR": "/b"}, "/b/enginepool", id="runtime-dir"),
    ],
)
def test_run_dir_source(environ: dict[str, str], folder: str) -> None:
    assert run_dir(environ) == Path(folder)


def test_run_dir_in_the_temp_folder_is_one_a_user() -> None:
    assert run_dir({}).name == f"enginepool-{os.getuid()}"


def test_make_run_dir_is_private(environ: dict[str, str]) -> None:
    assert _mode(make_run_dir(environ)) == 0o700


def test_make_run_dir_open_to_others_is_refused_and_left_alone(environ: dict[str, str]) -> None:
    run_dir(environ).mkdir()
    run_dir(environ).chmod(0o1777)
    with pytest.raises(SettingsError, match=r"open to others .mode 1777.*chmod 700"):
        make_run_dir(environ)
    assert _mode(run_dir(environ)) == 0o1777


def test_make_run_dir_of_another_user_is_refused(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_run_dir(environ)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(SettingsError, match="not a folder of yours"):
        make_run_dir(environ)


def test_make_run_dir_that_is_a_link_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run_dir(environ).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="not a folder of yours"):
        make_run_dir(environ)


def test_make_run_dir_over_a_file_is_refused(environ: dict[str, str]) -> None:
    run_dir(environ).touch()
    with pytest.raises(SettingsError, match="ENGINEPOOL_RUN_DIR"):
        make_run_dir(environ)


# Which endpoint is meant.


def test_default_endpoint_can_be_chosen_by_the_environment(environ: dict[str, str]) -> None:
    assert default_endpoint(environ) == f"ipc://{run_dir(environ)}/default.sock"
    assert default_endpoint({**environ, "ENGINEPOOL_ENDPOINT": "tcp://127.0.0.1:5"}) == "tcp://127.0.0.1:5"


# Claims.


def test_claim_default_goes_to_the_first_pool_and_the_second_gets_its_own(environ: dict[str, str], claims: list[Claim]) -> None:
    claims.append(claim_endpoint(None, "pool-1", environ))
    claims.append(claim_endpoint(None, "pool-2", environ))
    folder = run_dir(environ)
    assert [claim.endpoint for claim in claims] == [f"ipc://{folder}/default.sock", f"ipc://{folder}/pool-2.sock"]
    assert claims[0].secret != claims[1].secret


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_claim_of_a_held_endpoint_names_the_holder(environ: dict[str, str], claims: list[Claim], tmp_path: Path, scheme: str) -> None:
    endpoint = f"ipc://{tmp_path}/pool.sock" if scheme == "ipc" else "tcp://127.0.0.1:5555"
    claims.append(claim_endpoint(endpoint, "pool-1", environ))
    with pytest.raises(EndpointInUse, match=f"{re.escape(endpoint)} is held by the pool with pid {os.getpid()}") as caught:
        claim_endpoint(endpoint, "pool-2", environ)
    assert caught.value.exit_code == ExitCode.USAGE


def test_claim_after_release_is_free_again(environ: dict[str, str], claims: list[Claim]) -> None:
    claim_endpoint(None, "pool-1", environ).release()
    claims.append(claim_endpoint(None, "pool-2", environ))
    assert claims[0].endpoint.endswith("/default.sock")


def test_claim_over_what_a_dead_pool_left_behind(environ: dict[str, str], claims: list[Claim]) -> None:
    folder = make_run_dir(environ)
    for name in ("default.sock", "default.sock.back"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / name))
    (folder / "default.sock.lock").write_bytes(b"99999")
    (folder / "default.sock.secret").write_bytes(b"s" * 32)
    claims.append(claim_endpoint(None, "pool-1", environ))
    _serve(claims[0])
    assert read_secret(claims[0].endpoint, environ) == claims[0].secret


@pytest.mark.parametrize("suffix", ["", ".back", ".lock", ".secret"])
def test_claim_beside_a_file_of_the_users_is_refused_and_touches_nothing(environ: dict[str, str], tmp_path: Path, suffix: str) -> None:
    precious = tmp_path / f"data{suffix}"
    precious.write_text("precious")
    with pytest.raises(SettingsError, match="exists and is not a pool's"):
        claim_endpoint(f"ipc://{tmp_path}/data", "pool-1", environ)
    assert precious.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("data")] == [precious.name]


def test_claim_beside_a_pool_that_is_just_publishing_is_not_taken_for_foreign(environ: dict[str, str]) -> None:
    """Its draft becomes the secret while a newcomer looks at the files; what has gone is nobody's."""
    folder = rundir.make_run_dir(environ)
    endpoint = f"ipc://{folder}/default.sock"
    draft, secret = (rundir.beside(endpoint, folder, suffix) for suffix in ("draft", "secret"))
    is_over = threading.Event()

    def publish() -> None:
        while not is_over.is_set():
            draft.write_bytes(b"x" * 32)
            draft.rename(secret)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(3000):
            rundir.refuse_foreign_files(endpoint, folder)
    finally:
        is_over.set()
        publisher.join()


def test_claim_beside_pools_that_are_just_ending(environ: dict[str, str]) -> None:
    """They remove their files without a word to the newcomer, who sweeps the same folder."""
    folder = rundir.make_run_dir(environ)
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            claim = claim_endpoint(f"ipc://{folder}/brief.sock", "brief", environ)
            claim.back = f"ipc://{folder}/brief.sock.back"
            for address in (claim.endpoint, claim.back):
                with socket.socket(socket.AF_UNIX) as bound:
                    bound.bind(address.removeprefix("ipc://"))
            claim.publish(claim.endpoint)
            claim.release()

    brief = threading.Thread(target=come_and_go)
    brief.start()
    try:
        for _ in range(400):
            claim_endpoint(None, "mine", environ).release()
        assert brief.is_alive()
    finally:
        is_over.set()
        brief.join()


def test_claim_of_a_folder_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match="exists and is not a pool's"):
        claim_endpoint(f"ipc://{tmp_path}/folder", "pool-1", environ)


def test_claim_in_a_folder_that_is_missing_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere/pool\.sock\.lock: No such file"):
        claim_endpoint(f"ipc://{tmp_path}/nowhere/pool.sock", "pool-1", environ)


def test_claim_in_a_run_dir_with_a_long_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="set ENGINEPOOL_RUN_DIR"):
        claim_endpoint(None, "pool-1", {"ENGINEPOOL_RUN_DIR": str(tmp_path / ("x" * 100))})


def test_publish_closes_secret_and_sockets_to_others(environ: dict[str, str], claims: list[Claim]) -> None:
    claims.append(claim_endpoint(None, "pool-1", environ))
    _serve(claims[0])
    modes = {path.name: _mode(path) for path in run_dir(environ).iterdir()}
    assert modes == dict.fromkeys(["default.sock", "default.sock.back", "default.sock.lock", "default.sock.secret"], 0o600)


@pytest.mark.parametrize("given", [None, "tcp://127.0.0.1:5555", "tcp://127.0.0.1:0"], ids=["ipc", "tcp", "tcp-any-port"])
def test_release_leaves_nothing_behind(environ: dict[str, str], given: str | None) -> None:
    claim = claim_endpoint(given, "pool-1", environ)
    Path(claim.back.removeprefix("ipc://")).touch()
    if given is None:
        _serve(claim)
    else:
        claim.publish("tcp://127.0.0.1:5556")
    claim.release()
    assert list(run_dir(environ).iterdir()) == []


def test_release_before_publish_is_fine(environ: dict[str, str]) -> None:
    claim_endpoint(None, "pool-1", environ).release()
    assert list(run_dir(environ).iterdir()) == []


def test_secret_is_published_for_the_port_the_kernel_gave(environ: dict[str, str], claims: list[Claim]) -> None:
    claims.append(claim_endpoint("tcp://127.0.0.1:0", "pool-1", environ))
    Path(claims[0].back.removeprefix("ipc://")).touch()
    claims[0].publish("tcp://127.0.0.1:40001")
    assert read_secret("tcp://127.0.0.1:40001", environ) == claims[0].secret


def test_secret_is_found_by_either_name_of_this_machine(environ: dict[str, str], claims: list[Claim]) -> None:
    claims.append(claim_endpoint("tcp://localhost:40001", "pool-1", environ))
    Path(claims[0].back.removeprefix("ipc://")).touch()
    claims[0].publish("tcp://127.0.0.1:40001")
    assert read_secret("tcp://localhost:40001", environ) == claims[0].secret


def test_read_secret_where_no_pool_is(environ: dict[str, str]) -> None:
    with pytest.raises(NoDispatcher, match=r"no pool at ipc:///x\.sock: start one"):
        read_secret("ipc:///x.sock", environ)


def test_read_secret_that_is_not_ours(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path, mode: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(NoDispatcher, match=r"no access .*Permission denied"):
        read_secret("ipc:///x.sock", environ)
