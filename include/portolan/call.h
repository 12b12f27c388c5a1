/*
 * Common declarations of the other headers of this folder.
 *
 * The functions are defined in the library that `portolan run` loads into a program. A program may also be linked with
 * it, and then runs on Portolan by itself:
 *
 *     cc $(pkg-config --cflags portolan) -o program program.c $(pkg-config --libs portolan)
 *
 * The functions are declared weak: in a program that is not linked, and runs without it, they are null, which the program
 * must check:
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
