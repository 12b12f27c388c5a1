/*
 * Answers `get KEY` from a map that the owner fills; the answer is `VALUE = ` and 32 bytes. What is
 * not there, and what is no such question, the owner gets.
 */
#include <portolan/extension.h>

#define KEY 16
#define VALUE 32

struct key {
	__u32 words[KEY / 4];
};

struct value {
	__u64 words[VALUE / 8];
};

PORTOLAN_MAP(values, PORTOLAN_HASH, struct key, struct value, 4096);

/* Questions answered, for the owner to read. */
static __u64 hits;

PORTOLAN_PREDICATE int is_question(struct portolan_view *view)
{
	const __u8 *payload = view->payload;

	return view->captured > 4 && view->captured <= 4 + KEY && payload[0] == 'g' &&
	       payload[1] == 'e' && payload[2] == 't' && payload[3] == ' ';
}

PORTOLAN_HANDLER int answer(struct portolan_view *view)
{
	/* Behind what was captured there are zeros, which fill the key up. */
	struct key key = *(struct key *)(view->payload + 4);
	struct value *value = portolan_find(&values, &key);

	if (!value)
		return PORTOLAN_PASS;
	__builtin_memcpy(view->payload, "VALUE = ", 8);
	*(struct value *)(view->payload + 8) = *value;
	view->length = 8 + VALUE;
	__sync_fetch_and_add(&hits, 1);
	return PORTOLAN_REPLY;
}
