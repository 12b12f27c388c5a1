/*
 * Protocols of a program's own, above Ethernet, above IP, or at a port of TCP or UDP, beside TCP and UDP of the same
 * host. A flow has all frames of one EtherType, or all packets of one IP protocol, or those for one port, and sends such
 * frames; what goes through it are whole Ethernet frames.
 *
 * Functions return -1 with errno set when something is refused. Among the errors are
 *
 *     EINVAL        the stacks of this host live by that protocol; or the frame has no Ethernet header
 *     EPERM         this user may not have it ([[raw]] in the server's configuration)
 *     EADDRINUSE    another program has it, or the kernel has the port
 *     EACCES        the port is below ip_unprivileged_port_start (1024), and this program may not bind such
 *     EADDRNOTAVAIL the address is none of a device that Portolan serves
 *     ENOBUFS       this program has too many
 *     ENETDOWN      there is no server
 *     ECONNRESET    the server has gone, and with it whatever delivers frames
 *     EAGAIN        no frame came in time
 *     EINTR         a signal was handled
 *     EBADF         no such flow; a child of fork has not its parent's
 */
#ifndef PORTOLAN_RAW_H
#define PORTOLAN_RAW_H

#include "call.h"

PORTOLAN_BEGIN

/* Takes a protocol for this program; returns the flow's number, which is no descriptor. */
PORTOLAN_WEAK int portolan_raw_ethertype(uint16_t number);
PORTOLAN_WEAK int portolan_raw_protocol(uint8_t number);

/*
 * As above, for a transport of one's own at a port of TCP or UDP, as `protocol` says (IPPROTO_TCP, IPPROTO_UDP): the
 * kernel and other programs have the other ports. `local` is as of bind: any address of this host or one, port 0 for an
 * ephemeral one. What comes is as it came over the wire, fragments and segments that the device has put together
 * included, and ICMP errors about what was sent from there.
 */
PORTOLAN_WEAK int portolan_raw_port(int protocol, const struct sockaddr *local, socklen_t length);

/* Where that is, as getsockname says it; EOPNOTSUPP of other flows. */
PORTOLAN_WEAK int portolan_raw_name(int flow, struct sockaddr *local, socklen_t *length);

/* Gives it up, when no other thread is in a call for it any more. */
PORTOLAN_WEAK int portolan_raw_close(int flow);

/*
 * The next frame, from its Ethernet header on. Waits for it as long as `timeout_ms`, or for ever if that is negative.
 * Returns the frame's length, of which no more than `size` bytes were copied.
 */
PORTOLAN_WEAK ssize_t portolan_raw_recv(int flow, void *frame, size_t size, int timeout_ms);

/*
 * Sends a whole frame; waits while the device is busy. The source's MAC address must be that of a device that Portolan
 * serves, and the source address of a packet one of this host, its source port the flow's; else the kernel drops the
 * frame and counts it.
 */
PORTOLAN_WEAK int portolan_raw_send(int flow, const void *frame, size_t length);

/* The first part of the way to a destination. */
struct portolan_hop {
    uint32_t interface;  /* index of the device */
    uint32_t mtu;        /* bytes behind the Ethernet header */
    uint8_t own_mac[6];
    uint8_t next_mac[6]; /* of the destination, or of the gateway */
    uint8_t source[16];  /* of this host, as the route has it; of IPv4 the first four */
};

/*
 * Where packets go first, as the kernel's routes and neighbours say. `address` is a struct in_addr or in6_addr, as
 * `family` says (AF_INET, AF_INET6). Waits until the neighbour is known, as long as `timeout_ms`: EHOSTUNREACH if it did
 * not answer, ENETUNREACH if there is no route by a device that Portolan serves.
 */
PORTOLAN_WEAK int portolan_raw_hop(int flow, int family, const void *address, int timeout_ms,
                                   struct portolan_hop *hop);

/* Frames that came while too many were unread. */
PORTOLAN_WEAK int64_t portolan_raw_dropped(int flow);

PORTOLAN_END

#endif
