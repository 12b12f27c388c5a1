/*
 * Sends to ADDRESS PORT over TCP at a reserved rate: `portolan run guarantees 10.0.0.1 5001 20000000`.
 * Without Portolan it sends as fast as the kernel lets it.
 *
 *     cc -I/usr/local/include -o guarantees guarantees.c
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <portolan/qos.h>

#define BYTES (4 << 20)

static int dial(const char *address, const char *port)
{
    struct sockaddr_in peer = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || inet_pton(AF_INET, address, &peer.sin_addr) != 1)
        return -1;
    return connect(fd, (struct sockaddr *)&peer, sizeof peer) < 0 ? -1 : fd;
}

/* A rate that is not granted is no reason to stop. */
static void reserve(int fd, uint64_t rate)
{
    struct portolan_transmit spec = { .rate = rate };
    if (!portolan_transmit_reserve)
        puts("not on Portolan");
    else if (portolan_transmit_reserve(fd, &spec) < 0)
        printf("refused: %s (%s)\n", portolan_refusal(), strerror(errno));
    else
        printf("reserved %llu bit/s\n", (unsigned long long)rate);
    fflush(stdout);
}

static int send_all(int fd)
{
    static char bytes[1 << 16];
    for (size_t sent = 0; sent < BYTES;) {
        ssize_t some = write(fd, bytes, sizeof bytes);
        if (some < 0)
            return -1;
        sent += (size_t)some;
    }
    /* What the peer has not got yet waits at the rate, too: it closes when it has all. */
    shutdown(fd, SHUT_WR);
    return read(fd, bytes, sizeof bytes) == 0 ? 0 : -1;
}

int main(int count, char **words)
{
    if (count != 4) {
        fprintf(stderr, "usage: %s ADDRESS PORT BITS-PER-SECOND\n", words[0]);
        return 2;
    }
    int fd = dial(words[1], words[2]);
    if (fd < 0) {
        perror("connect");
        return 1;
    }
    reserve(fd, strtoull(words[3], NULL, 10));
    if (send_all(fd) < 0) {
        perror("send");
        return 1;
    }
    puts("sent");
    /* The reservation of a connection ends with it. */
    return close(fd) < 0;
}
