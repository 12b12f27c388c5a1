/*
 * Options of Portolan's sockets that the kernel's do not have, for setsockopt and getsockopt at level SOL_SOCKET. Each
 * value is an int; -1, the default, leaves the choice to Portolan. The kernel's sockets refuse them with ENOPROTOOPT, as
 * they do all unknown options: a program may set them wherever it runs, and ignore that error.
 */
#ifndef PORTOLAN_SOCKET_H
#define PORTOLAN_SOCKET_H

#include "call.h"

/*
 * Of a listener, at any time: whether children of the process use accepted connections (more than 0), or the process
 * itself does (0). By default the server observes which process uses a connection first.
 */
#ifndef SO_CONCURRENT_SERVER
#define SO_CONCURRENT_SERVER 0x5043
#endif

/*
 * Of a listener, before listen: whether the process performs the handshakes of its port (more than 0), or the server
 * does (0). A flood of SYNs to the port then takes no CPU time from other programs. The administrator may forbid it.
 */
#ifndef SO_DELEGATE
#define SO_DELEGATE 0x5044
#endif

/* How packets of a session reach the process, before connect or listen: one of the forms below. */
#ifndef SO_DELIVERY
#define SO_DELIVERY 0x5045
#endif

#define PORTOLAN_DELIVERY_RING 0   /* by a ring in shared memory */
#define PORTOLAN_DELIVERY_TAP 1    /* by a system call per packet */
#define PORTOLAN_DELIVERY_SERVER 2 /* the server runs TCP and relays the data */
#define PORTOLAN_DELIVERY_DRIVER 3 /* as by the ring, which a filter in the device's driver fills */

/*
 * Of a connected socket, or before: whether its session has a receive ring of its own (more than 0), or shares that of
 * the process (0). The number of rings of a process is limited by the configuration; beyond it the shared ring is used.
 */
#ifndef SO_DIRECT
#define SO_DIRECT 0x5046
#endif

#endif
