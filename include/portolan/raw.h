/*
 * A program's own protocols, above Ethernet, above IP, or at a TCP or UDP port, beside TCP and UDP
 * of the same host. A flow receives all frames of one EtherType, or all packets of one IP protocol,
 * or those for one port, and may send such frames. Whole Ethernet frames are passed.
 *
 * Functions return -1 and set errno if a call fails. Among the errors are
 *
 *     EINVAL        the host's own stacks need that protocol; or the frame has no Ethernet header
 *     EPERM         this user may not have it ([[raw]] in the server's configuration)
 *     EADDRINUSE    another program has it, or the kernel has the port
 *     EACCES        the port is below ip_unprivileged_port_start (1024), and this program may not bind such
 *     EADDRNOTAVAIL the address is not on a device that Portolan serves
 *     ENOBUFS       this program has too many
 *     ENETDOWN      there is no server
 *     ECONNRESET    the server was stopped for good, or the next one does not grant the protocol; while a server is
 *                   restarted, frames are not delivered
 *     EAGAIN        no frame arrived in time
 *     EINTR         a signal was handled
 *     EBADF         no such flow; a child of fork does not have its parent's
 */
#ifndef PORTOLAN_RAW_H
#define PORTOLAN_RAW_H

#include "call.h"

PORTOLAN_BEGIN

/* Claims a protocol for this program. Returns the flow's number, which is not a descriptor. */
PORTOLAN_WEAK int portolan_raw_ethertype(uint16_t number);
PORTOLAN_WEAK int portolan_raw_protocol(uint8_t number);

/*
 * Claims a TCP or UDP port (`protocol` is IPPROTO_TCP or IPPROTO_UDP) for a transport of the program's own:
 * the other ports stay with the kernel and other programs. `local` is as for bind: any address of this host,
 * or one of them, and port 0 for an ephemeral one. Packets are delivered as received, including fragments and
 * segments that the device has merged, and ICMP errors about packets sent from there.
 */
PORTOLAN_WEAK int portolan_raw_port(int protocol, const struct sockaddr *local, socklen_t length);

/* Returns the claimed endpoint, like getsockname; EOPNOTSUPP for other flows. */
PORTOLAN_WEAK int portolan_raw_name(int flow, struct sockaddr *local, socklen_t *length);

/* Closes a flow, once no other thread is in a call for it. */
PORTOLAN_WEAK int portolan_raw_close(int flow);

/*
 * Receives the next frame, with its Ethernet header. Waits at most `timeout_ms`, or without limit
 * if that is negative. Returns the frame's length, of which at most `size` bytes were copied.
 */
PORTOLAN_WEAK ssize_t portolan_raw_recv(int flow, void *frame, size_t size, int timeout_ms);

/*
 * Sends a whole frame; waits while the device is busy. The source MAC address must be that of a
 * device that Portolan serves, the source IP address one of this host, and the source port the
 * flow's; else the kernel drops the frame and counts it.
 */
PORTOLAN_WEAK int portolan_raw_send(int flow, const void *frame, size_t length);

/* The first hop of a path to a destination. */
struct portolan_hop {
    uint32_t interface;  /* index of the device */
    uint32_t mtu;        /* in bytes, without the Ethernet header */
    uint8_t own_mac[6];
    uint8_t next_mac[6]; /* of the destination, or of the gateway */
    uint8_t source[16];  /* the host's address preferred by the route; for IPv4 the first four bytes */
};

/*
 * Returns the first hop towards an address, by the kernel's routes and neighbours. `address` is a struct in_addr or
 * in6_addr, according to `family` (AF_INET, AF_INET6). Waits until the neighbour is known, at most `timeout_ms`:
 * EHOSTUNREACH if it did not answer, ENETUNREACH if there is no route through a device that Portolan serves.
 */
PORTOLAN_WEAK int portolan_raw_hop(int flow, int family, const void *address, int timeout_ms,
                                   struct portolan_hop *hop);

/* Returns the number of frames dropped because too many were unread. */
PORTOLAN_WEAK int64_t portolan_raw_dropped(int flow);

PORTOLAN_END

#endif
