/*
 * Guarantees for programs on Portolan: rates for what they send, budgets for what they receive, CPU
 * time for their threads, and groups that share a reserved rate.
 *
 * Functions return 0 unless stated otherwise; if the request is refused, they return -1 and set
 * errno, and portolan_refusal() returns the reason, with the numbers. Among the errors are
 *
 *     EINVAL, ERANGE  a number out of range, or contradictory parameters
 *     EPERM           it does not belong to the caller
 *     EACCES          the mode of a group does not permit it
 *     ESRCH           no such process, thread or connection
 *     ENOENT          no such guarantee or group
 *     EEXIST          the group exists already
 *     EBUSY           it does not fit, and the reason says what would; or the flow has a rate already
 *     ENOSPC, EDQUOT  a limit is reached, the system's or the caller's
 *     ENODEV          no such link, or none with a known rate
 *     EOPNOTSUPP      the kernel does not support it here
 *     ENOTSOCK        the descriptor is not a socket of Portolan's
 *     ECONNREFUSED    there is no server
 *     ENETDOWN        the server is gone
 *
 * A structure must be zeroed before it is filled in: zero means the default.
 */
#ifndef PORTOLAN_QOS_H
#define PORTOLAN_QOS_H

#include "call.h"

PORTOLAN_BEGIN

/* Instead of a descriptor: all sessions and threads of this process. */
#define PORTOLAN_PROCESS (-1)
/* For CPU time only: the calling thread. */
#define PORTOLAN_THREAD (-2)

/* Returns why the last call of this thread was refused; valid until its next call. Never null. */
PORTOLAN_WEAK const char *portolan_refusal(void);

/*
 * Transmit. `whom` is a socket: its connection, or without a peer, its port; or PORTOLAN_PROCESS.
 */

#define PORTOLAN_SLACK UINT64_MAX

struct portolan_transmit {
    uint64_t rate;      /* bits per second, Ethernet headers included; 0: given by slice_us and period_us */
    uint64_t ceiling;   /* bits per second while the link has slack; 0: none, PORTOLAN_SLACK: the link's rate */
    uint32_t slice_us;  /* share of each period of the link's time, microseconds */
    uint32_t period_us; /* microseconds */
    uint32_t burst;     /* bytes that may be sent at once after a pause; 0: a slice's worth */
    uint32_t reserved;  /* 0 */
    const char *device; /* the link; null: the only one with a known rate */
};

/* Makes or changes a reservation. */
PORTOLAN_WEAK int portolan_transmit_reserve(int whom, const struct portolan_transmit *spec);
PORTOLAN_WEAK int portolan_transmit_release(int whom);

/*
 * Receive. Packets beyond the budget are dropped by the packet filter, and counted for this program.
 */

#define PORTOLAN_PRIORITY(n) ((uint32_t)(n) + 1)

struct portolan_receive {
    uint64_t bits;     /* bits per second, Ethernet headers included; 0: no limit */
    uint32_t packets;  /* packets per second; 0: no limit */
    uint32_t burst_ms; /* time for which unused budget accumulates, milliseconds; 0: 50 */
    uint32_t priority; /* PORTOLAN_PRIORITY(0), dropped first when the ring fills, to (7); 0: none; for sockets only */
    uint32_t reserved; /* 0 */
};

PORTOLAN_WEAK int portolan_receive_reserve(int whom, const struct portolan_receive *spec);
PORTOLAN_WEAK int portolan_receive_release(int whom);

/*
 * CPU. `whom` is PORTOLAN_THREAD or PORTOLAN_PROCESS.
 */

#define PORTOLAN_ADAPT_OFF 0
#define PORTOLAN_ADAPT_PROPOSE 1 /* `portolan qos show` shows a better rate */
#define PORTOLAN_ADAPT_AUTO 2    /* the rate is adapted, from least_ppm to most_ppm */

struct portolan_cpu {
    uint32_t rate_ppm;  /* millionths of one CPU: 1 to 1000000 */
    uint32_t period_us; /* period in which the rate is guaranteed, microseconds; 0: 100000 */
    uint32_t slack;     /* not 0: may exceed its rate while CPUs are idle */
    uint32_t adapt;     /* PORTOLAN_ADAPT_... */
    uint32_t least_ppm; /* limits of PORTOLAN_ADAPT_AUTO */
    uint32_t most_ppm;
    const char *service_class; /* null: the default one */
};

PORTOLAN_WEAK int portolan_cpu_reserve(int whom, const struct portolan_cpu *spec);
PORTOLAN_WEAK int portolan_cpu_release(int whom);

/*
 * Multiplex groups (Yau and Lam, "Migrating Sockets", Table I): several flows, of several processes, share a reserved
 * rate, each with a rate of its own. A key names a group on this host.
 */

#define PORTOLAN_GROUP_SHARE 1u /* members may use the unused rates of the others */
#define PORTOLAN_GROUP_SLACK 2u /* the group may exceed its rate while the link has slack */
#define PORTOLAN_GROUP_KEEP 4u  /* the group persists when its creator and its members are gone */

#define PORTOLAN_ALGORITHM_RATE 0u /* each member has its rate at any time, like KT_RC */

struct portolan_group {
    const char *device; /* the link; null: the only one with a known rate */
    uint32_t options;   /* PORTOLAN_GROUP_... */
    uint32_t algorithm; /* PORTOLAN_ALGORITHM_RATE; others are refused (EOPNOTSUPP) */
};

/*
 * Creates a group with `rate` bits per second. `mode` is like a file's, 0 to 0777: the right to
 * join the group (execute), to inspect it (read) and to change it (write). `params` may be null.
 */
PORTOLAN_WEAK int portolan_group_create(uint32_t key, uint64_t rate, const struct portolan_group *params, uint32_t mode);
/* Checks that the group exists, and that this process may join it. */
PORTOLAN_WEAK int portolan_group_open(uint32_t key);
/* Replaces all options. */
PORTOLAN_WEAK int portolan_group_setoption(uint32_t key, uint32_t options);
/* Changes the rate of the whole group, which is admitted like a new one: not below its members' rates. */
PORTOLAN_WEAK int portolan_group_setrate(uint32_t key, uint64_t rate);
/* Adds a socket's flow, or PORTOLAN_PROCESS, with `rate` bits per second. Returns the member's number in the group. */
PORTOLAN_WEAK int64_t portolan_group_join(uint32_t key, int whom, uint64_t rate);
PORTOLAN_WEAK int portolan_group_leave(uint32_t key, uint32_t member);
/* Deletes the group, and with it the rates of its members. */
PORTOLAN_WEAK int portolan_group_delete(uint32_t key);

PORTOLAN_END

#endif
