/*
 * Sends all that comes to one port, control packets included, on to another host, and what that one
 * answers back. Each client has a port of the owner's towards the other host; when there are more
 * clients than ports, the port of the oldest serves the next.
 */
#include <portolan/extension.h>

#define PORTS 32

struct settings {
	/* The other host. */
	__u8 to[16];
	__u32 to_port;
	/* What clients send to. */
	__u32 front;
};

struct client {
	__u64 address[2];
	__u32 port;
	__u32 reserved;
};

/* One of the owner's ports, and the client that has it. */
struct place {
	struct client client;
	__u32 back;
	__u32 reserved;
};

/* The owner fills these: where to, its ports, and the places of these. */
PORTOLAN_MAP(settings, PORTOLAN_ARRAY, __u32, struct settings, 1);
PORTOLAN_MAP(places, PORTOLAN_ARRAY, __u32, struct place, PORTS);
PORTOLAN_MAP(place_of_port, PORTOLAN_HASH, __u32, __u32, PORTS);

PORTOLAN_MAP(place_of_client, PORTOLAN_LRU_HASH, struct client, __u32, 4 * PORTS);

static __u32 next_place;

static __attribute__((always_inline)) int is_same(const struct client *a, const struct client *b)
{
	return a->port == b->port && a->address[0] == b->address[0] &&
	       a->address[1] == b->address[1];
}

static __attribute__((always_inline)) int to_host(struct portolan_view *view,
						  const struct settings *to)
{
	struct client client = { .port = view->remote_port };
	struct place *place;
	__u32 *known, number;

	__builtin_memcpy(client.address, view->remote, sizeof(client.address));
	known = portolan_find(&place_of_client, &client);
	number = known ? *known : __sync_fetch_and_add(&next_place, 1) % PORTS;
	place = portolan_find(&places, &number);
	if (!place)
		return PORTOLAN_CONSUME;
	/* Its place may have gone to another meanwhile, which it takes back. */
	if (!is_same(&place->client, &client)) {
		place->client = client;
		portolan_set(&place_of_client, &client, &number, 0);
	}
	__builtin_memcpy(view->to, to->to, sizeof(view->to));
	view->to_port = to->to_port;
	view->from_port = place->back;
	return PORTOLAN_FORWARD;
}

static __attribute__((always_inline)) int to_client(struct portolan_view *view,
						    const struct settings *to)
{
	__u32 port = view->local_port;
	__u32 *number = portolan_find(&place_of_port, &port);
	struct place *place = number ? portolan_find(&places, number) : 0;

	if (!place || !place->client.port)
		return PORTOLAN_CONSUME;
	__builtin_memcpy(view->to, place->client.address, sizeof(view->to));
	view->to_port = place->client.port;
	view->from_port = to->front;
	return PORTOLAN_FORWARD;
}

PORTOLAN_HANDLER int forward(struct portolan_view *view)
{
	__u32 zero = 0;
	const struct settings *to = portolan_find(&settings, &zero);

	if (!to)
		return PORTOLAN_PASS;
	return view->local_port == to->front ? to_host(view, to) : to_client(view, to);
}
