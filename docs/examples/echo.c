/*
 * An echo server that is linked with Portolan, and so runs on it without `portolan run`: `echo 10.0.0.2 7`. It reads by
 * shared buffers where a connection is Portolan's, and as usual where it is the kernel's.
 *
 *     cc $(pkg-config --cflags portolan) -o echo echo.c $(pkg-config --libs portolan)
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <portolan/buf.h>
#include <portolan/socket.h>

#define PIECES 16

static int listen_at(const char *address, const char *port)
{
    struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1, itself = 0;

    if (fd < 0 || inet_pton(AF_INET, address, &own.sin_addr) != 1)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    /* No child will use the connections. The kernel's sockets do not know the option. */
    if (setsockopt(fd, SOL_SOCKET, SO_CONCURRENT_SERVER, &itself, sizeof itself) < 0 && errno != ENOPROTOOPT)
        return -1;
    if (bind(fd, (struct sockaddr *)&own, sizeof own) < 0 || listen(fd, 16) < 0)
        return -1;
    return fd;
}

static int send_all(int fd, const char *bytes, size_t length)
{
    while (length > 0) {
        ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);
        if (sent < 0)
            return -1;
        bytes += sent;
        length -= (size_t)sent;
    }
    return 0;
}

static int echo_pieces(int fd)
{
    struct portolan_piece pieces[PIECES];
    ssize_t count;

    while ((count = portolan_buf_receive(fd, pieces, PIECES, NULL, NULL)) > 0) {
        int result = 0;
        for (ssize_t i = 0; i < count; i++) {
            if (result == 0)
                result = send_all(fd, pieces[i].data, pieces[i].length);
            portolan_buf_give_back(pieces[i].number);
        }
        if (result < 0)
            return -1;
    }
    return (int)count;
}

static int echo_bytes(int fd)
{
    char bytes[16384];
    ssize_t length;

    while ((length = recv(fd, bytes, sizeof bytes, 0)) > 0)
        if (send_all(fd, bytes, (size_t)length) < 0)
            return -1;
    return (int)length;
}

int main(int count, char **words)
{
    int listener = count == 3 ? listen_at(words[1], words[2]) : -1;

    if (listener < 0) {
        perror("usage: echo ADDRESS PORT");
        return 1;
    }
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        if (echo_pieces(fd) < 0 && errno == EOPNOTSUPP)
            echo_bytes(fd);
        close(fd);
    }
}
