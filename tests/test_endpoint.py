"""Addresses: what a pool listens at and what a client connects to, and that beyond loopback both want keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginepool.endpoint import check_endpoint, check_target, connectable, is_loopback, is_near
from enginepool.errors import SettingsError

BOTH = [
    pytest.param("ipc:///run/x.sock", id="ipc"),
    pytest.param("ipc:///" + "x" * 101, id="ipc-longest"),
    pytest.param("tcp://127.0.0.1:0", id="tcp-any-port"),
    pytest.param("tcp://127.0.0.1:65535", id="tcp-last-port"),
    pytest.param("tcp://127.8.0.1:5555", id="tcp-other-loopback"),
    pytest.param("tcp://localhost:5555", id="tcp-localhost"),
]
NEITHER = [
    pytest.param("ipc://x.sock", "absolute", id="ipc-relative"),
    pytest.param("ipc:///" + "x" * 102, "longer than 102 bytes", id="ipc-too-long"),
    pytest.param("ipc:///" + "é" * 51, "longer than 102 bytes", id="ipc-too-long-in-bytes"),
    pytest.param("ipc:///x\0.sock", "null byte", id="ipc-null-byte"),
    pytest.param("tcp://[::1]:5555", "IPv6 is not supported", id="tcp-ipv6"),
    pytest.param("tcp://::1:5555", "IPv6 is not supported", id="tcp-ipv6-bare"),
    pytest.param("tcp://127.0.0.1", "tcp://ADDRESS:PORT", id="tcp-without-port"),
    pytest.param("tcp://127.0.0.1:", "tcp://ADDRESS:PORT", id="tcp-empty-port"),
    pytest.param("tcp://:5555", "tcp://ADDRESS:PORT", id="tcp-without-host"),
    pytest.param("tcp://127.0.0.1:55x", "tcp://ADDRESS:PORT", id="tcp-port-of-letters"),
    pytest.param("tcp://127.0.0.1:５５", "tcp://ADDRESS:PORT", id="tcp-port-of-other-digits"),
    pytest.param("tcp://127.0.0.1:5555/x", "tcp://ADDRESS:PORT", id="tcp-with-a-path"),
    pytest.param("tcp://127.0.0.1:5555\n", "tcp://ADDRESS:PORT", id="tcp-with-a-line-break"),
    pytest.param("tcp://127.0.0.1:65536", "at most 65535", id="tcp-port-too-high"),
    pytest.param("tcp://127.0.0.256:5555", "'127.0.0.256'", id="tcp-no-such-number"),
    pytest.param("tcp://127.1:5555", "'127.1'", id="tcp-short-form"),
    pytest.param("tcp://*:5555", r"'\*'", id="tcp-star"),
    pytest.param("http://127.0.0.1:80", "write ipc", id="http"),
    pytest.param("/run/x.sock", "write ipc", id="bare-path"),
    pytest.param("", "write ipc", id="empty"),
]
FAR = ["tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555"]
NAMED = ["tcp://gpu-box:5555", "tcp://a.example.org:5555", "tcp://127.0.0.1.example.org:5555"]


@pytest.mark.parametrize("endpoint", BOTH)
def test_endpoint_of_this_machine_needs_no_keys(endpoint: str) -> None:
    check_endpoint(endpoint)
    check_target(endpoint)
    assert is_near(endpoint)


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize(("endpoint", "told"), NEITHER)
def test_endpoint_that_makes_no_sense_is_refused_on_both_sides(endpoint: str, told: str, has_keys: bool) -> None:
    for check in (check_endpoint, check_target):
        with pytest.raises(SettingsError, match=told):
            check(endpoint, has_keys=has_keys)


@pytest.mark.parametrize("endpoint", FAR)
def test_endpoint_beyond_loopback_is_served_with_keys_only(endpoint: str) -> None:
    check_endpoint(endpoint, has_keys=True)
    assert not is_loopback(endpoint)
    with pytest.raises(SettingsError, match=r"beyond loopback a pool is served only with keys; make them \(enginepool keys"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", NAMED)
def test_name_of_a_machine_is_for_clients_with_keys(endpoint: str) -> None:
    check_target(endpoint, has_keys=True)
    assert not is_near(endpoint)
    with pytest.raises(SettingsError, match=r"wants keys; give the client\.keys"):
        check_target(endpoint)
    with pytest.raises(SettingsError, match="listens at a numeric IPv4 address"):
        check_endpoint(endpoint, has_keys=True)


@pytest.mark.parametrize("check", [check_endpoint, check_target])
def test_keys_for_an_ipc_socket_are_refused(check: Callable[..., None]) -> None:
    with pytest.raises(SettingsError, match=r"keys are for tcp.*unset ENGINEPOOL_KEYS"):
        check("ipc:///run/x.sock", has_keys=True)


def test_all_interfaces_are_reached_by_loopback() -> None:
    assert connectable("tcp://0.0.0.0:5555") == "tcp://127.0.0.1:5555"
    assert connectable("tcp://localhost:5555") == "tcp://127.0.0.1:5555"
    assert connectable("tcp://10.0.0.1:5555") == "tcp://10.0.0.1:5555"
    assert connectable("ipc:///run/x.sock") == "ipc:///run/x.sock"
    assert is_near("tcp://0.0.0.0:5555")
