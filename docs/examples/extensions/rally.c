/* Sends each datagram back as often as the owner says, and notes when the first and the last came. */
#include <portolan/extension.h>

struct rally {
	__u64 left;
	__u64 began;
	__u64 ended;
};

PORTOLAN_MAP(rallies, PORTOLAN_ARRAY, __u32, struct rally, 1);

PORTOLAN_HANDLER int volley(struct portolan_view *view)
{
	__u32 zero = 0;
	struct rally *rally = portolan_find(&rallies, &zero);

	if (!rally || rally->left == 0)
		return PORTOLAN_DELIVER;
	if (!rally->began)
		rally->began = view->time;
	rally->ended = view->time;
	rally->left -= 1;
	return rally->left ? PORTOLAN_REPLY : PORTOLAN_DELIVER;
}
