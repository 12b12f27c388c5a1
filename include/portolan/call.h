/*
 * Common declarations of the other headers of this folder.
 *
 * The functions are defined in libportolan_preload.so, which `portolan run` loads into a program. They are
 * declared weak: in a program that runs without it they are null, which the program must check:
 *
 *     int flow = portolan_raw_ethertype ? portolan_raw_ethertype(0x88b5) : -1;
 *
 * Functions return -1 and set errno if a call fails.
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
