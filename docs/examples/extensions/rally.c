/* Sends each datagram back as often as the owner says, and sorts the times between two that came by their length. */
#include <portolan/extension.h>

/* Of 16 ns each; the last one has all that took longer. */
#define LENGTHS 4096

struct rally {
	__u64 left;
	__u64 last;
};

PORTOLAN_MAP(rallies, PORTOLAN_ARRAY, __u32, struct rally, 1);
PORTOLAN_MAP(lengths, PORTOLAN_ARRAY, __u32, __u64, LENGTHS);

static inline void note(__u64 time)
{
	__u32 length = time < LENGTHS * 16 ? time / 16 : LENGTHS - 1;
	__u64 *times = portolan_find(&lengths, &length);

	if (times)
		*times += 1;
}

PORTOLAN_HANDLER int volley(struct portolan_view *view)
{
	__u32 zero = 0;
	struct rally *rally = portolan_find(&rallies, &zero);

	if (!rally || rally->left == 0)
		return PORTOLAN_DELIVER;
	if (rally->last)
		note(view->time - rally->last);
	rally->last = view->time;
	rally->left -= 1;
	return rally->left ? PORTOLAN_REPLY : PORTOLAN_DELIVER;
}
