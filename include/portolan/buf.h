/*
 * Shared buffers: receiving and sending without the copy between the program and the protocol stack. Received pieces lie
 * where the kernel put them; pieces to send are filled in place, and leave from there. For sockets of TCP and UDP that are
 * Portolan's.
 *
 * A piece is the program's until it is given back, also when its socket is closed or its session has gone to another
 * process; a child of fork has a copy of its own. Pieces are given back in any order and by any thread. Received bytes count
 * against the receive window until then: who keeps them is sent no more at some point.
 *
 * Functions return -1 with errno set when something is refused. Among the errors are
 *
 *     EBADF         no such piece: it was given back or sent already; or no descriptor
 *     EOPNOTSUPP    the socket is the kernel's, or the server relays it: use recv and send
 *     EAGAIN        nothing came, or there was no room, within the socket's time-out, or the socket does not wait
 *     EINVAL        no room for pieces; or more bytes than the piece has
 *     others        as of recv and send
 */
#ifndef PORTOLAN_BUF_H
#define PORTOLAN_BUF_H

#include "call.h"

PORTOLAN_BEGIN

/* Received bytes; not to be written to. */
struct portolan_piece {
    const void *data;
    size_t length;   /* bytes */
    uint64_t number; /* what it is given back by; never the same twice */
};

/* Memory to be filled, and sent. */
struct portolan_room {
    void *data;
    size_t length;   /* bytes that there is room for */
    uint64_t number;
};

/*
 * Receives what is there, or waits for the next: at most `count` pieces, of which there must be one at least, in the order
 * of the stream; of a datagram one. Returns how many; 0: the peer has ended the stream. `from` and `room` are those of
 * recvfrom, or null.
 */
PORTOLAN_WEAK ssize_t portolan_buf_receive(int fd, struct portolan_piece *pieces, size_t count,
                                           struct sockaddr *from, socklen_t *room);

/* Memory of 128 KiB, of no socket in particular. What is in it is left from an earlier piece of this process. */
PORTOLAN_WEAK int portolan_buf_reserve(struct portolan_room *room);

/*
 * Sends the first `length` bytes of what was reserved, and waits for room in the send buffer. 64 KiB and more are sent from
 * where they lie; less is copied. Returns how many bytes were taken. If that is all of them the piece is gone; if it is
 * less, `data` begins so many bytes later from then on; after an error it is as it was.
 */
PORTOLAN_WEAK ssize_t portolan_buf_send(int fd, uint64_t number, size_t length);

/* Gives a piece back, received or reserved. */
PORTOLAN_WEAK int portolan_buf_give_back(uint64_t number);

PORTOLAN_END

#endif
