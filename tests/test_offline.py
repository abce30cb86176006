"""Machines without a network: a model on disk needs none, one that is missing is told within a second, and nobody waits for the hub."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Serve
from surroundings import customized, without_network

from enginepool.errors import ExitCode
from enginepool.worker.engine import hint_for

OFFLINE = {"HF_HUB_OFFLINE": "1"}
NO_HUB = """
import socket
def refuse(*arguments): raise AssertionError(f'something connects: {arguments}')
socket.socket.connect = socket.getaddrinfo = refuse
"""
"""Not a stub of ours: the hub's clients, whichever, go through these."""


def _folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def _cached(home: Path) -> dict[str, str]:
    """A hub cache whose one snapshot consists of broken links."""
    repository = home / "hub" / "models--me--mine"
    snapshot = _folder(repository / "snapshots" / "abc")
    _folder(repository / "refs")
    (repository / "refs" / "main").write_text("abc")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return OFFLINE | {"HF_HOME": str(home)}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("make", "model", "told"),
    [
        pytest.param(
            lambda path: OFFLINE | {"HF_HOME": str(path)},
            "me/mine",
            "HF_HUB_OFFLINE is set and the model is not in the hub's cache",
            id="not in the cache",
        ),
        pytest.param(lambda path: _cached(path), "me/mine", "config.json is a broken link", id="a snapshot of broken links"),
        pytest.param(lambda path: OFFLINE, "/nonexistent/model", "there is no such file or folder", id="no such path"),
        pytest.param(lambda path: OFFLINE, "./model", "there is no such file or folder", id="no such relative path"),
        pytest.param(
            lambda path: {"HF_HOME": str(_folder(path / "me" / "mine", "README.md"))},
            "me/mine",
            "/me/mine goes before a hub model of that name, but the folder has no config.json",
            id="a folder with the hub id's name",
        ),
    ],
)
def test_model_that_can_not_be_had_is_told_at_once(
    serve: Serve, tmp_path: Path, make: Callable[[Path], dict[str, str]], model: str, told: str
) -> None:
    """In the dispatcher, before any worker starts, and without a word to the network."""
    env = customized(tmp_path, everywhere=NO_HUB) | make(tmp_path)
    served = serve(model, "--workers", "2", env=env, preexec_fn=lambda: os.chdir(tmp_path))
    code, stderr = served.finish(20)
    assert code == ExitCode.START_FAILED
    assert told in stderr
    assert "started" not in stderr


def test_pool_needs_no_network_interface(serve: Serve) -> None:
    """Not even loopback: local sockets are files."""
    _needs_network_namespaces()
    assert '"state":"ready"' in serve("--engine", "echo", "--workers", "2", preexec_fn=without_network(loopback=False)).ready_line()


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        pytest.param(
            ConnectionError("[Errno -3] Temporary failure in name resolution"), "HF_HUB_OFFLINE=1 lets a model in its cache load", id="hub"
        ),
        pytest.param(RuntimeError("ifa != nullptr. Unable to find interface for: [127.0.0.1]"), "ip link set lo up", id="loopback"),
    ],
)
def test_failure_for_lack_of_a_network_has_a_way_out(error: Exception, hint: str) -> None:
    assert hint in hint_for(error)


def _needs_network_namespaces() -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
