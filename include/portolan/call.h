/*
 * What all functions of a program's own have in common: those of the other headers of this folder.
 *
 * They are libportolan_preload.so's, which `portolan run` puts into a program. Declared weak, they are null in a program
 * that runs without it, which it has to look at once:
 *
 *     int flow = portolan_raw_ethertype ? portolan_raw_ethertype(0x88b5) : -1;
 *
 * What is refused returns -1 with errno set.
 */
#ifndef PORTOLAN_CALL_H
#define PORTOLAN_CALL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

#define PORTOLAN_WEAK __attribute__((weak))

#ifdef __cplusplus
#define PORTOLAN_BEGIN extern "C" {
#define PORTOLAN_END }
#else
#define PORTOLAN_BEGIN
#define PORTOLAN_END
#endif

#endif
