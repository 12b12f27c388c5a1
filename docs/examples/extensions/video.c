/*
 * Sends each datagram of its owner's to everybody that the owner has entered: a video server that
 * hands each frame over once (PX 5.1).
 */
#include <portolan/extension.h>

struct audience {
	__u32 count;
	__u32 reserved;
	struct portolan_destination each[PORTOLAN_COPIES];
};

/* The owner fills it, and may change it between two frames. */
PORTOLAN_MAP(audiences, PORTOLAN_ARRAY, __u32, struct audience, 1);

PORTOLAN_SEND_HANDLER int video(struct portolan_sending *sending)
{
	__u32 zero = 0;
	const struct audience *audience = portolan_find(&audiences, &zero);

	if (!audience || !audience->count)
		return PORTOLAN_CONSUME;
	sending->copies = audience->count;
	__builtin_memcpy(sending->destinations, audience->each, sizeof(sending->destinations));
	return PORTOLAN_COPY;
}
