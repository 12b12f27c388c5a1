/*
 * Guarantees for programs on Portolan: rates for what they send, budgets for what they receive, time for their threads,
 * and groups that share a reserved rate.
 *
 * Functions return 0 unless they say otherwise, and -1 with errno set when the request is refused; portolan_refusal() then
 * says why, with the numbers. Among the errors are
 *
 *     EINVAL, ERANGE  a number out of its range, or terms that contradict each other
 *     EPERM           it is somebody else's
 *     EACCES          the mode of a group does not let you
 *     ESRCH           there is no such process, thread or connection
 *     ENOENT          there is no such guarantee or group
 *     EEXIST          there is such a group already
 *     EBUSY           it does not fit, and the reason says what would; or the flow has a rate already
 *     ENOSPC, EDQUOT  there are as many as there can be, or as you may have
 *     ENODEV          no such link, or none with a known rate
 *     EOPNOTSUPP      the kernel cannot do it here
 *     ENOTSOCK        the descriptor is not a socket on Portolan
 *     ECONNREFUSED    there is no server
 *     ENETDOWN        the server has gone
 *
 * A structure is to be zeroed before it is filled in: what is zero has its default.
 */
#ifndef PORTOLAN_QOS_H
#define PORTOLAN_QOS_H

#include "call.h"

PORTOLAN_BEGIN

/* Instead of a descriptor: all that this process has. */
#define PORTOLAN_PROCESS (-1)
/* For time on a CPU only: the calling thread. */
#define PORTOLAN_THREAD (-2)

/* Why the last call of this thread was refused; valid until its next one. Never null. */
PORTOLAN_WEAK const char *portolan_refusal(void);

/*
 * Transmit. `whom` is a socket: its connection, or if it has no peer, its port. Or it is PORTOLAN_PROCESS.
 */

#define PORTOLAN_SLACK UINT64_MAX

struct portolan_transmit {
    uint64_t rate;      /* bits per second, Ethernet headers included; 0: slice_us and period_us say it */
    uint64_t ceiling;   /* bits per second while the link has slack; 0: none, PORTOLAN_SLACK: the link's rate */
    uint32_t slice_us;  /* of each period of the link's time, microseconds */
    uint32_t period_us; /* microseconds */
    uint32_t burst;     /* bytes that may go at once after a pause; 0: a slice's worth */
    uint32_t reserved;  /* 0 */
    const char *device; /* the link; null: the only one that has a rate */
};

/* Makes or changes a reservation. */
PORTOLAN_WEAK int portolan_transmit_reserve(int whom, const struct portolan_transmit *spec);
PORTOLAN_WEAK int portolan_transmit_release(int whom);

/*
 * Receive. What exceeds the budget is dropped by the packet filter, and counted for this program.
 */

#define PORTOLAN_PRIORITY(n) ((uint32_t)(n) + 1)

struct portolan_receive {
    uint64_t bits;     /* bits per second, Ethernet headers included; 0: any */
    uint32_t packets;  /* packets per second; 0: any */
    uint32_t burst_ms; /* how long the budget may be saved up, milliseconds; 0: 50 */
    uint32_t priority; /* PORTOLAN_PRIORITY(0), dropped first when the ring fills, to (7); 0: none; for sockets only */
    uint32_t reserved; /* 0 */
};

PORTOLAN_WEAK int portolan_receive_reserve(int whom, const struct portolan_receive *spec);
PORTOLAN_WEAK int portolan_receive_release(int whom);

/*
 * CPU. `whom` is PORTOLAN_THREAD or PORTOLAN_PROCESS.
 */

#define PORTOLAN_ADAPT_OFF 0
#define PORTOLAN_ADAPT_PROPOSE 1 /* a better rate is shown by `portolan qos show` */
#define PORTOLAN_ADAPT_AUTO 2    /* the rate is changed, from least_ppm to most_ppm */

struct portolan_cpu {
    uint32_t rate_ppm;  /* millionths of one CPU: 1 to 1000000 */
    uint32_t period_us; /* microseconds within which the rate is given; 0: 100000 */
    uint32_t slack;     /* not 0: may run beyond its rate while CPUs are idle */
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

#define PORTOLAN_GROUP_SHARE 1u /* members may use what others of the group leave */
#define PORTOLAN_GROUP_SLACK 2u /* the group goes beyond its rate while the link has slack */
#define PORTOLAN_GROUP_KEEP 4u  /* the group stays when its maker and its members have gone */

#define PORTOLAN_ALGORITHM_RATE 0u /* each member has its rate at any time, as by KT_RC */

struct portolan_group {
    const char *device; /* the link; null: the only one that has a rate */
    uint32_t options;   /* PORTOLAN_GROUP_... */
    uint32_t algorithm; /* PORTOLAN_ALGORITHM_RATE; others are refused (EOPNOTSUPP) */
};

/*
 * Makes a group with `rate` bits per second. `mode` is as a file's, 0 to 0777: who may join it (execute), look at it
 * (read) and change it (write). `params` may be null.
 */
PORTOLAN_WEAK int portolan_group_create(uint32_t key, uint64_t rate, const struct portolan_group *params, uint32_t mode);
/* Is there such a group, and may this process join it? */
PORTOLAN_WEAK int portolan_group_open(uint32_t key);
/* Sets all options at once. */
PORTOLAN_WEAK int portolan_group_setoption(uint32_t key, uint32_t options);
/* Changes the rate of all together, which is admitted like a new one: not below what the members have. */
PORTOLAN_WEAK int portolan_group_setrate(uint32_t key, uint64_t rate);
/* Adds a socket's flow, or PORTOLAN_PROCESS, with `rate` bits per second. Returns its number in the group. */
PORTOLAN_WEAK int64_t portolan_group_join(uint32_t key, int whom, uint64_t rate);
PORTOLAN_WEAK int portolan_group_leave(uint32_t key, uint32_t member);
/* Ends the group, and the rates of its members with it. */
PORTOLAN_WEAK int portolan_group_delete(uint32_t key);

PORTOLAN_END

#endif
