"""Ports are checked before anything is started, and picked when 0."""

import socket

import pytest

from pagestream.cli.ports import FREE_PORTS, PortError, resolve_ports

LOCAL = "127.0.0.1"
FLAGS = ("http-port", "grpc-port", "metrics-port")


@pytest.fixture
def listener():
    with socket.create_server((LOCAL, 0)) as server:
        yield server.getsockname()[1]


def test_zero_picks_different_free_ports():
    ports = resolve_ports(LOCAL, dict.fromkeys(FLAGS, 0))
    assert tuple(ports) == FLAGS
    assert len(set(ports.values())) == 3
    for port in ports.values():
        assert port in FREE_PORTS
        socket.create_server((LOCAL, port)).close()


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("host", [LOCAL, "0.0.0.0"])
def test_a_port_in_use_is_named_with_its_flag(listener, flag, host):
    wanted = {**dict.fromkeys(FLAGS, 0), flag: listener}
    with pytest.raises(PortError, match=rf"port {listener} is in use .* --{flag}"):
        resolve_ports(host, wanted)


def test_a_port_whose_last_connection_is_closing_is_free():
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((LOCAL, port)):
            connection, _ = server.accept()
            connection.close()
    assert resolve_ports(LOCAL, {"http-port": port}) == {"http-port": port}


def test_one_port_for_two_flags_is_refused():
    port = resolve_ports(LOCAL, {"http-port": 0})["http-port"]
    with pytest.raises(PortError, match=f"--http-port and --grpc-port are both {port}"):
        resolve_ports(LOCAL, {"http-port": port, "grpc-port": port})


def test_an_address_of_another_machine_is_refused():
    # TEST-NET-1, which no machine has.
    with pytest.raises(PortError, match=r"--host 192\.0\.2\.1 --http-port 8000"):
        resolve_ports("192.0.2.1", {"http-port": 8000})
