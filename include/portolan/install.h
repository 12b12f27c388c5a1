/*
 * Protocol extensions of a program: installs objects made with <portolan/extension.h> for the
 * program's own sockets, or flows (<portolan/raw.h>), and gives access to their maps.
 *
 * Functions return -1 and set errno if a call fails; portolan_refusal() then returns the reason. Among the errors are
 *
 *     EINVAL        the object is not an extension; a descriptor is not a bound socket of Portolan's, or one that does
 *                   not raise such events; or a name or a priority is out of range
 *     EPERM         this user may not install it ([[extension.allow]] in the server's configuration)
 *     EACCES        the code does something that extensions may not do, or the kernel's verifier rejects it
 *     EDQUOT        the program, its user, or the event has reached its limit of extensions, or of memory
 *     EAGAIN        too many extensions wait to be verified
 *     ECONNREFUSED  there is no server
 *     ENETDOWN      the server is gone
 *     ENOENT        the extension has no such map, or the map no such entry
 *     EBADF         no such extension, or no such flow; a child of fork does not have its parent's
 */
#ifndef PORTOLAN_INSTALL_H
#define PORTOLAN_INSTALL_H

#include "call.h"

PORTOLAN_BEGIN

/* The extension to install. Must be zeroed before it is filled in. */
struct portolan_spec {
    const char *name;   /* shown by `portolan ext list`, 1 to 32 bytes */
    const void *object; /* the object file made by clang */
    size_t length;
    uint32_t priority;  /* 0 to 255; handlers are called in ascending order */
    uint32_t reserved;
};

/*
 * Installs the handler for packets received on sockets, or, if it is a send handler, for packets that the program sends
 * from them. The sockets are bound UDP sockets, or TCP listeners: for these the handler also sees packets of the
 * connections that the program accepts. For send handlers, they are sockets of either protocol. Returns the extension's
 * number.
 *
 * An extension ends with portolan_extension_remove(), when one of its sockets is closed, or when the program ends.
 */
PORTOLAN_WEAK int portolan_extension_install(const struct portolan_spec *spec, const int *sockets, size_t count);

/* The same for a flow of <portolan/raw.h>. */
PORTOLAN_WEAK int portolan_extension_install_raw(const struct portolan_spec *spec, int flow);

/* Removes an extension. Its handler is no longer called when this returns. */
PORTOLAN_WEAK int portolan_extension_remove(int extension);

/* Returns the number that `portolan ext list` shows. */
PORTOLAN_WEAK int portolan_extension_number(int extension);

/*
 * Maps, by the names that the object gives them; those of global variables are .data, .bss and .rodata. Sizes are those
 * of the map, in bytes. For a PORTOLAN_PERCPU_ARRAY, one processor's value is read, and all are written.
 */
PORTOLAN_WEAK int portolan_map_get(int extension, const char *map, const void *key, size_t key_size, void *value,
                                   size_t value_size);
PORTOLAN_WEAK int portolan_map_set(int extension, const char *map, const void *key, size_t key_size,
                                   const void *value, size_t value_size);
PORTOLAN_WEAK int portolan_map_remove(int extension, const char *map, const void *key, size_t key_size);

/* Returns a new descriptor of the map, for bpf(2): for the values of each processor, and for rings. */
PORTOLAN_WEAK int portolan_map_descriptor(int extension, const char *map);

PORTOLAN_END

#endif
