/*
 * Handlers in a thread of the program, for what comes to a UDP port of its own: for what takes longer than a handler in
 * the packet filter may (<portolan/extension.h>), or needs more than that has. They see what handlers in the filter leave
 * to the owner; what they pass or deliver the program gets by portolan_thread_recv().
 *
 * Functions return -1 with errno set when something is refused. Among the errors are
 *
 *     EINVAL        the descriptor is not a bound UDP socket on Portolan; a handler without function or name, or none
 *     EDQUOT        the process has too many handlers
 *     EAGAIN        nothing came in time; or there can be no more threads
 *     ECONNRESET    the server has gone
 *     EBADF         no such thread; a child of fork has not its parent's
 */
#ifndef PORTOLAN_THREAD_H
#define PORTOLAN_THREAD_H

#include "call.h"

PORTOLAN_BEGIN

/* What a handler returns; anything else is as the first. */
#define PORTOLAN_THREAD_PASS 0    /* to the next handler; after the last one, to the program */
#define PORTOLAN_THREAD_CONSUME 1 /* it ends here */
#define PORTOLAN_THREAD_REPLY 2   /* the payload, as it is by now, goes back to the sender */
#define PORTOLAN_THREAD_DELIVER 3 /* to the program, past the handlers that would follow */

/* What came, in the handlers' own copy: they see each other's edits. */
struct portolan_datagram {
    void *payload;
    size_t length; /* the handler may change it, up to `room` */
    size_t room;   /* bytes that there are at `payload`, 2048 or more */
    const struct sockaddr *from;
    socklen_t from_length;
    uint32_t reserved;
};

/* A handler; it may call anything, and takes as long as it takes. */
struct portolan_thread_handler {
    const char *name; /* that `portolan ext list` shows, 32 bytes at most */
    int (*call)(void *context, struct portolan_datagram *datagram);
    void *context;
    uint32_t priority; /* 0 to 255: the lowest is called first; of equals, the first */
    uint32_t reserved; /* 0 */
};

/*
 * Has handlers called for what comes to a socket, in a thread of their own, which takes no signals. The socket is the
 * thread's from then on, also to close. Returns the thread's number, which is no descriptor.
 */
PORTOLAN_WEAK int portolan_thread_start(int socket, const struct portolan_thread_handler *handlers,
                                        size_t count);

/*
 * The next datagram that the handlers leave to the program, and if `from` is not null, who sent it. Waits for it as long
 * as `timeout_ms`, or for ever if that is negative. Returns the datagram's length, of which no more than `size` bytes
 * were copied. 1024 wait; more are dropped.
 */
PORTOLAN_WEAK ssize_t portolan_thread_recv(int thread, void *payload, size_t size, struct sockaddr *from,
                                           socklen_t *from_length, int timeout_ms);

/* Datagrams that were dropped since the program did not fetch them. */
PORTOLAN_WEAK int64_t portolan_thread_dropped(int thread);

/* Ends the thread and closes the socket: no handler runs when this returns. Not from a handler. */
PORTOLAN_WEAK int portolan_thread_stop(int thread);

PORTOLAN_END

#endif
