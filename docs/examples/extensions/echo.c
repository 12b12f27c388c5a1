/* Answers each datagram with itself (RFC 862). */
#include <portolan/extension.h>

PORTOLAN_HANDLER int echo(struct portolan_view *view)
{
	/* What is longer than a view goes to the owner, as all would without this. */
	if (view->captured < view->packet_length)
		return PORTOLAN_DELIVER;
	return PORTOLAN_REPLY;
}
