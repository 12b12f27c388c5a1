/*
 * Keeps hosts out, on a listener: what comes from an address in the map ends in the packet filter, SYNs and what is of
 * connections that were accepted before. The owner reads there how much that was.
 */
#include <portolan/extension.h>

struct host {
	__u64 words[2];
};

PORTOLAN_MAP(outside, PORTOLAN_HASH, struct host, __u64, 4096);

PORTOLAN_HANDLER int gate(struct portolan_view *view)
{
	struct host host = *(struct host *)view->remote;
	__u64 *kept_out = portolan_find(&outside, &host);

	if (!kept_out)
		return PORTOLAN_PASS;
	__sync_fetch_and_add(kept_out, 1);
	return PORTOLAN_CONSUME;
}
