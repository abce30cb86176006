"""Keys files: made once, for their owner alone, and refused with the reason when they are anything else."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ENGINEPOOL

from enginepool.errors import ExitCode, SettingsError
from enginepool.keys import PoolKeys, read_client_keys, read_pool_keys
from enginepool.make_keys import make_keys
from enginepool.transport import Dealer, Router


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """The pool's file and the client's."""
    return make_keys(tmp_path / "keys")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Making them.


def test_keys_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        files = make_keys(tmp_path / "new" / "keys")
    finally:
        os.umask(umask)
    assert [_mode(path) for path in (files[0].parent, *files)] == [0o700, 0o600, 0o600]


def test_keys_of_pool_and_client_fit_and_no_two_are_alike(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool, client = read_pool_keys(files[0]), read_client_keys(files[1])
    assert (client.server_public, client.client_public, client.secret) == (pool.server_public, pool.client_public, pool.secret)
    assert not isinstance(client, PoolKeys)
    assert pool.server_secret.hex() not in files[1].read_text()
    other = read_pool_keys(make_keys(tmp_path / "other")[0])
    mine = {pool.server_public, pool.server_secret, pool.client_public, pool.client_secret, pool.secret}
    assert len(mine | {other.server_public, other.server_secret, other.client_public, other.client_secret, other.secret}) == 10


def test_pools_file_serves_for_a_client_on_its_machine(files: tuple[Path, Path]) -> None:
    assert read_client_keys(files[0]).client_secret == read_client_keys(files[1]).client_secret


@pytest.mark.parametrize("taken", ["pool.keys", "client.keys"])
def test_keys_that_are_there_are_not_overwritten(tmp_path: Path, taken: str) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    (folder / taken).write_text("precious")
    done = subprocess.run([*ENGINEPOOL, "keys", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.USAGE
    assert f"{folder / taken} exists and is not overwritten" in done.stderr
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(taken, "precious")]


def test_keys_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys" / "pool.keys").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingsError, match="not overwritten"):
        make_keys(tmp_path / "keys")
    assert not (tmp_path / "elsewhere").exists()


def test_keys_in_an_open_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(SettingsError, match=r"open to others \(mode 755\); chmod 700"):
        make_keys(tmp_path / "keys")
    assert list((tmp_path / "keys").iterdir()) == []


def test_keys_where_no_folder_can_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"file.*: Not a directory; name another folder"):
        make_keys(tmp_path / "file" / "keys")


def test_keys_command_tells_the_next_step(tmp_path: Path) -> None:
    done = subprocess.run([*ENGINEPOOL, "keys", str(tmp_path / "keys")], capture_output=True, text=True, timeout=60, check=True)
    assert f"serve --endpoint tcp://0.0.0.0:5555 --keys {tmp_path}/keys/pool.keys" in done.stdout
    assert not re.search("[0-9a-f]{32}", done.stdout)


# Reading them.


def _edit(old: str, new: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        text = path.read_text()
        assert re.search(old, text)
        path.write_text(re.sub(old, new, text, count=1))

    return edit


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


FAULTS = [
    pytest.param(lambda path: path.chmod(0o640), r"open to others \(mode 640\); chmod 600 it", id="readable-by-the-group"),
    pytest.param(lambda path: path.chmod(0o604), r"open to others \(mode 604\); chmod 600 it", id="readable-by-all"),
    pytest.param(lambda path: path.chmod(0o620), r"open to others \(mode 620\); chmod 600 it", id="writable-by-the-group"),
    pytest.param(lambda path: path.unlink(), "No such file", id="missing"),
    pytest.param(_folder, "is not a file", id="folder"),
    pytest.param(_pipe, "is not a file", id="pipe"),
    pytest.param(lambda path: path.write_bytes(b""), "server_public is missing", id="empty"),
    pytest.param(lambda path: path.write_bytes(os.urandom(400)), "copy it anew", id="garbage"),
    pytest.param(lambda path: path.write_bytes(b"\0" * (1 << 17)), "larger than", id="huge"),
    pytest.param(_cut, "copy it anew", id="truncated"),
    pytest.param(_edit(r"secret = .*\n", ""), "secret is missing", id="line-missing"),
    pytest.param(_edit(r'secret = "..', 'secret = "'), "secret is not 64 hexadecimal digits", id="too-short"),
    pytest.param(_edit(r'secret = "..', 'secret = "zz'), "secret is not 64 hexadecimal digits", id="no-hex"),
    pytest.param(_edit(r'secret = ".*"', "secret = 5"), "secret is not 64 hexadecimal digits", id="number"),
    pytest.param(_edit("$", '\nserver_key = "x"\n'), "there is no key 'server_key'", id="unknown-key"),
]


@pytest.mark.parametrize("side", [0, 1], ids=["pool", "client"])
@pytest.mark.parametrize(("spoil", "told"), FAULTS)
def test_keys_file_with_a_fault_is_refused_with_the_reason(
    files: tuple[Path, Path], side: int, spoil: Callable[[Path], None], told: str
) -> None:
    spoil(files[side])
    with pytest.raises(SettingsError, match=told) as caught:
        (read_pool_keys, read_client_keys)[side](files[side])
    assert str(files[side]) in str(caught.value)


def test_clients_file_can_not_serve(files: tuple[Path, Path]) -> None:
    with pytest.raises(SettingsError, match=r"server_secret is missing: it is a client's; the pool needs the pool\.keys"):
        read_pool_keys(files[1])


def test_keys_file_behind_a_link_is_judged_by_what_it_is(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(files[1])
    assert read_client_keys(tmp_path / "link").path == str(tmp_path / "link")
    files[1].chmod(0o644)
    with pytest.raises(SettingsError, match="open to others"):
        read_client_keys(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_keys_file_of_another_user_is_refused(files: tuple[Path, Path]) -> None:
    os.chown(files[1], 65534, 65534)
    with pytest.raises(SettingsError, match=r"belongs to another user \(uid 65534\); make a copy of your own"):
        read_client_keys(files[1])


@pytest.mark.parametrize("name", ["client", "server"])
def test_public_key_that_belongs_to_another_secret_is_refused(files: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    other = read_pool_keys(make_keys(tmp_path / "other")[0])
    _edit(f"{name}_public = .*", f'{name}_public = "{getattr(other, f"{name}_public").hex()}"')(files[0])
    with pytest.raises(SettingsError, match=f"{name}_public does not belong to {name}_secret"):
        Router(1000, keys=read_pool_keys(files[0]))


def test_client_with_a_mixed_up_pair_is_refused_before_it_connects(files: tuple[Path, Path]) -> None:
    _edit("client_secret = .*", f'client_secret = "{"1" * 64}"')(files[1])
    with pytest.raises(SettingsError, match="client_public does not belong to client_secret"):
        Dealer("tcp://127.0.0.1:5555", keys=read_client_keys(files[1]))


def test_keys_do_not_show_in_a_traceback(files: tuple[Path, Path]) -> None:
    for keys in (read_pool_keys(files[0]), read_client_keys(files[1])):
        shown = f"{keys!r} {keys} {keys.__rich_repr__()}"
        assert str(files[0].parent) in shown
        assert keys.secret.hex() not in shown
        assert repr(keys.secret) not in shown
