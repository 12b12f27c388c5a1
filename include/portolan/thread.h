/*
 * Handlers in a thread of the program, for datagrams received on its own UDP port: for work that takes longer than a
 * handler in the packet filter may (<portolan/extension.h>), or needs more than that can use. They see the datagrams
 * that handlers in the filter pass to the owner; those that they pass or deliver are returned by
 * portolan_thread_recv().
 *
 * Functions return -1 and set errno if a call fails. Among the errors are
 *
 *     EINVAL        the descriptor is not a bound UDP socket of Portolan's; no handler; or one without function or name
 *     EDQUOT        the process has too many handlers
 *     EAGAIN        nothing arrived in time; or no more threads can be created
 *     ECONNRESET    the server is gone
 *     EBADF         no such thread; a child of fork does not have its parent's
 */
#ifndef PORTOLAN_THREAD_H
#define PORTOLAN_THREAD_H

#include "call.h"

PORTOLAN_BEGIN

/* Return values of a handler; any other value means the first. */
#define PORTOLAN_THREAD_PASS 0    /* to the next handler; after the last one, to the program */
#define PORTOLAN_THREAD_CONSUME 1 /* discarded */
#define PORTOLAN_THREAD_REPLY 2   /* the payload, as edited so far, is sent back to the sender */
#define PORTOLAN_THREAD_DELIVER 3 /* to the program; the remaining handlers are skipped */

/* A datagram, in the handlers' own copy: each handler sees the edits of the previous ones. */
struct portolan_datagram {
    void *payload;
    size_t length; /* the handler may change it, up to `room` */
    size_t room;   /* bytes available at `payload`, at least 2048 */
    const struct sockaddr *from;
    socklen_t from_length;
    uint32_t reserved;
};

/* A handler; it may call anything, and its run time is not limited. */
struct portolan_thread_handler {
    const char *name; /* shown by `portolan ext list`, at most 32 bytes */
    int (*call)(void *context, struct portolan_datagram *datagram);
    void *context;
    uint32_t priority; /* 0 to 255: in ascending order; in order of the array if equal */
    uint32_t reserved; /* 0 */
};

/*
 * Calls handlers for datagrams received on a socket, in a new thread with all signals blocked. The socket belongs to
 * the thread from then on, which also closes it. Returns the thread's number, which is not a descriptor.
 */
PORTOLAN_WEAK int portolan_thread_start(int socket, const struct portolan_thread_handler *handlers,
                                        size_t count);

/*
 * Receives the next datagram that the handlers pass to the program, and if `from` is not null, its
 * sender. Waits at most `timeout_ms`, or without limit if that is negative. Returns the datagram's
 * length, of which at most `size` bytes were copied. Up to 1024 datagrams wait; more are dropped.
 */
PORTOLAN_WEAK ssize_t portolan_thread_recv(int thread, void *payload, size_t size, struct sockaddr *from,
                                           socklen_t *from_length, int timeout_ms);

/* Returns the number of datagrams dropped because the program did not fetch them. */
PORTOLAN_WEAK int64_t portolan_thread_dropped(int thread);

/* Ends the thread and closes the socket: no handler runs when this returns. Not to be called by a handler. */
PORTOLAN_WEAK int portolan_thread_stop(int thread);

PORTOLAN_END

#endif
