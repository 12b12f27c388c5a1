/*
 * A protocol of one's own straight over Ethernet: whoever is greeted greets back.
 *
 * usage: greetings serve
 *        greetings call ADDRESS COUNT
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <portolan/raw.h>

/* For local experiments (IEEE 802). */
#define ETHERTYPE 0x88b5
#define HEADER 14
#define PATIENCE_MS 5000

static int fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    return 1;
}

/* Writes an Ethernet header to the front of a frame. */
static void address_to(unsigned char *frame, const unsigned char *to, const unsigned char *from)
{
    memmove(frame, to, 6);
    memmove(frame + 6, from, 6);
    frame[12] = ETHERTYPE >> 8;
    frame[13] = ETHERTYPE & 0xff;
}

static int serve(int flow)
{
    unsigned char frame[1514], answer[1514];
    ssize_t length;

    while ((length = portolan_raw_recv(flow, frame, sizeof(frame), -1)) >= HEADER) {
        if ((size_t)length > sizeof(frame))
            continue;
        memcpy(answer, frame, (size_t)length);
        address_to(answer, frame + 6, frame);
        if (portolan_raw_send(flow, answer, (size_t)length) < 0)
            return fail("send");
    }
    return fail("recv");
}

static int call(int flow, const char *address, unsigned long count)
{
    unsigned char frame[60] = {0}, answer[60];
    struct portolan_hop hop;
    struct in_addr to;

    if (inet_pton(AF_INET, address, &to) != 1 ||
        portolan_raw_hop(flow, AF_INET, &to, PATIENCE_MS, &hop) < 0)
        return fail(address);
    address_to(frame, hop.next_mac, hop.own_mac);
    for (unsigned long i = 1; i <= count; i++) {
        snprintf((char *)frame + HEADER, sizeof(frame) - HEADER, "greeting %lu", i);
        if (portolan_raw_send(flow, frame, sizeof(frame)) < 0)
            return fail("send");
        if (portolan_raw_recv(flow, answer, sizeof(answer), PATIENCE_MS) != sizeof(answer))
            return fail("recv");
        if (memcmp(answer + HEADER, frame + HEADER, sizeof(frame) - HEADER) != 0) {
            fprintf(stderr, "another answer\n");
            return 1;
        }
    }
    printf("%lu greetings, %lld dropped\n", count, (long long)portolan_raw_dropped(flow));
    return portolan_raw_close(flow) < 0;
}

int main(int count, char **words)
{
    int flow;

    if (!portolan_raw_ethertype) {
        fprintf(stderr, "not on Portolan\n");
        return 2;
    }
    flow = portolan_raw_ethertype(ETHERTYPE);
    if (flow < 0)
        return fail("greetings");
    if (count == 2 && strcmp(words[1], "serve") == 0)
        return serve(flow);
    if (count == 4 && strcmp(words[1], "call") == 0)
        return call(flow, words[2], strtoul(words[3], NULL, 10));
    fprintf(stderr, "usage: greetings serve | call ADDRESS COUNT\n");
    return 2;
}
