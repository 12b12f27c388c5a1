"""Measures the cost of a migration: a connection repeatedly migrates to the server and back. It is flushed because its
descriptor is sent in a message, whose receiver may be another process; it returns because no other process took it.

usage: give ADDRESS PORT BYTES | move ADDRESS PORT COUNT

`give` sends BYTES bytes to each client and waits until it closes. `move` prints the microseconds of one migration to the
server and back as JSON.
"""

import os
import socket
import sys
import time

# Seconds for the bytes to arrive in the session.
SETTLED = 0.3


def give(address, count):
    with socket.create_server(address) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"g" * count)
                connection.recv(1)


def look(connection):
    """Makes a call that needs the session but consumes no data."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass


def move(address, count):
    here, there = socket.socketpair()
    connection = socket.create_connection(address)
    time.sleep(SETTLED)
    look(connection)
    started = time.perf_counter()
    for _ in range(count):
        socket.send_fds(here, [b"!"], [connection.fileno()])
        _, descriptors, _, _ = socket.recv_fds(there, 1, 1)
        os.close(descriptors[0])
        look(connection)
    microseconds = (time.perf_counter() - started) * 1e6 / count
    print(f'{{"microseconds": {microseconds}}}')


role, host, port, number = sys.argv[1:]
{"give": give, "move": move}[role]((host, int(port)), int(number))
