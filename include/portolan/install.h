/*
 * Protocol extensions of a program: it installs what <portolan/extension.h> describes for sockets, or flows
 * (<portolan/raw.h>), of its own, and shares maps with it.
 *
 * Functions return -1 with errno set when something is refused; portolan_refusal() then says why. Among the errors are
 *
 *     EINVAL        the object is none of an extension; a descriptor is not a bound socket on Portolan, or one that does
 *                   not raise such events; or a name or a priority is out of its range
 *     EPERM         this user may not ([[extension.allow]] in the server's configuration)
 *     EACCES        the code does what no extension may, or the kernel's verifier does not believe it
 *     EDQUOT        the program, its user, or the event has as many as it may have, or as much memory
 *     EAGAIN        too many wait to be verified
 *     ECONNREFUSED  there is no server
 *     ENETDOWN      the server has gone
 *     ENOENT        the extension has no such map, or the map no such entry
 *     EBADF         no such extension, or no such flow; a child of fork has not its parent's
 */
#ifndef PORTOLAN_INSTALL_H
#define PORTOLAN_INSTALL_H

#include "call.h"

PORTOLAN_BEGIN

/* What is to be installed. To be zeroed before it is filled in. */
struct portolan_spec {
    const char *name;   /* that `portolan ext list` shows, 1 to 32 bytes */
    const void *object; /* what clang made of it */
    size_t length;
    uint32_t priority;  /* 0 to 255: the lowest is called first */
    uint32_t reserved;
};

/*
 * Has the handler be called for what comes to sockets, or for what the program sends from them, if it is written for that.
 * The sockets are bound ones of UDP, or listeners of TCP: with them the handler sees also what comes for connections that
 * the program accepts. For what is sent, they are sockets of either protocol. Returns the extension's number.
 *
 * An extension ends with portolan_extension_remove(), when one of its sockets is closed, or when the program ends.
 */
PORTOLAN_WEAK int portolan_extension_install(const struct portolan_spec *spec, const int *sockets, size_t count);

/* The same for a flow of <portolan/raw.h>. */
PORTOLAN_WEAK int portolan_extension_install_raw(const struct portolan_spec *spec, int flow);

/* The handler is called no more when this returns. */
PORTOLAN_WEAK int portolan_extension_remove(int extension);

/* As `portolan ext list` shows it. */
PORTOLAN_WEAK int portolan_extension_number(int extension);

/*
 * Maps, by the names that the object gives them; those of global variables are called .data, .bss and .rodata. Sizes are
 * those of the map, in bytes. Of a PORTOLAN_PERCPU_ARRAY, one processor's value is read, and all are written.
 */
PORTOLAN_WEAK int portolan_map_get(int extension, const char *map, const void *key, size_t key_size, void *value,
                                   size_t value_size);
PORTOLAN_WEAK int portolan_map_set(int extension, const char *map, const void *key, size_t key_size,
                                   const void *value, size_t value_size);
PORTOLAN_WEAK int portolan_map_remove(int extension, const char *map, const void *key, size_t key_size);

/* A new descriptor of the map, for bpf(2): the way to the values of each processor, and to rings. */
PORTOLAN_WEAK int portolan_map_descriptor(int extension, const char *map);

PORTOLAN_END

#endif
