/*
 * Active messages over Ethernet, as examples/src/bin/active-messages.rs has them, whose handlers run where the message
 * arrives: no process of the receiver wakes. What calls a handler that is not here the owner gets.
 *
 *     portolan ext install messages.o --ethertype 0x88b5
 */
#include <portolan/extension.h>

struct message {
	__u8 kind;
	__u8 handler;
	__u32 sequence;
	__u64 argument;
} __attribute__((packed));

#define ECHO 0
#define ADD 1
#define READ 2
/* Of the kind of an answer. */
#define ANSWER 0x80

static __u64 sum;

PORTOLAN_PREDICATE int is_call(struct portolan_view *view)
{
	const struct message *message = (void *)view->payload;

	return view->captured >= sizeof(*message) && message->kind == 0 && message->handler <= READ;
}

PORTOLAN_HANDLER int call(struct portolan_view *view)
{
	struct message *message = (void *)view->payload;
	__u64 argument = __builtin_bswap64(message->argument);

	if (message->handler == ADD)
		argument += __sync_fetch_and_add(&sum, argument);
	else if (message->handler == READ)
		argument = __sync_lock_test_and_set(&sum, 0);
	message->kind = ANSWER;
	message->argument = __builtin_bswap64(argument);
	view->length = sizeof(*message);
	return PORTOLAN_REPLY;
}
