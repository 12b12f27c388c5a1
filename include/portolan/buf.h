/*
 * Shared buffers: receiving and sending without a copy between the program and the protocol stack.
 * Received pieces stay where the kernel put them; pieces to send are filled in place, and sent from
 * there. For TCP and UDP sockets of Portolan's.
 *
 * A piece belongs to the program until it is given back, even if its socket is closed or its session moves to another
 * process; a child of fork has its own copy. Pieces may be given back in any order and by any thread. Until then
 * received bytes count against the receive window: the peer of a program that keeps them stops sending.
 *
 * Functions return -1 and set errno if a call fails. Among the errors are
 *
 *     EBADF         no such piece: it was given back or sent already; or no such descriptor
 *     EOPNOTSUPP    the socket is the kernel's, or the server relays it: use recv and send
 *     EAGAIN        nothing arrived, or there was no room, within the socket's time-out; or the socket is non-blocking
 *     EINVAL        no room for pieces; or more bytes than the piece has
 *     others        as for recv and send
 */
#ifndef PORTOLAN_BUF_H
#define PORTOLAN_BUF_H

#include "call.h"

PORTOLAN_BEGIN

/* Received bytes; read-only. */
struct portolan_piece {
    const void *data;
    size_t length;   /* bytes */
    uint64_t number; /* identifies the piece when it is given back; never used twice */
};

/* Memory to be filled and sent. */
struct portolan_room {
    void *data;
    size_t length;   /* capacity in bytes */
    uint64_t number;
};

/*
 * Receives pending data, or waits for the next: at most `count` pieces, which must be at least one,
 * in the order of the stream; one for a datagram. Returns how many; 0: the peer has ended the
 * stream. `from` and `room` are as for recvfrom, or null.
 */
PORTOLAN_WEAK ssize_t portolan_buf_receive(int fd, struct portolan_piece *pieces, size_t count,
                                           struct sockaddr *from, socklen_t *room);

/* Reserves 128 KiB of memory, for any socket. Its contents are left over from earlier pieces of this process. */
PORTOLAN_WEAK int portolan_buf_reserve(struct portolan_room *room);

/*
 * Sends the first `length` bytes of a reserved piece, and waits for room in the send buffer. 64 KiB or more are sent
 * without a copy; less is copied. Returns how many bytes were accepted. If it is all of them the piece is gone; if it
 * is less, `data` begins that many bytes later from then on; after an error it is unchanged.
 */
PORTOLAN_WEAK ssize_t portolan_buf_send(int fd, uint64_t number, size_t length);

/* Gives back a received or reserved piece. */
PORTOLAN_WEAK int portolan_buf_give_back(uint64_t number);

PORTOLAN_END

#endif
