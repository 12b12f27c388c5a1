import os, signal, socket, sys

address, port, hint = sys.argv[1:]
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.create_server((address, int(port)), backlog=128)
try:
    # SO_CONCURRENT_SERVER, which the kernel does not support.
    listener.setsockopt(socket.SOL_SOCKET, 0x5043, int(hint))
except OSError:
    pass
while True:
    connection, _ = listener.accept()
    if os.fork() == 0:
        connection.sendall(b"!")
        os._exit(0)
    connection.close()
