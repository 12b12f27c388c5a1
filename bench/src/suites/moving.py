"""A connection that leaves its program and comes back, again and again: what a migration costs. It leaves because its
descriptor goes into a message, which could be for somebody else; it comes back because nobody else took it.

usage: give ADDRESS PORT BYTES | move ADDRESS PORT COUNT

`give` sends each client bytes and waits until it closes. `move` prints the microseconds of one journey as JSON.
"""

import os
import socket
import sys
import time

# For bytes that were sent to lie in the session.
SETTLED = 0.3


def give(address, count):
    with socket.create_server(address) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"g" * count)
                connection.recv(1)


def look(connection):
    """A call that needs the session, and leaves what lies in it."""
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
