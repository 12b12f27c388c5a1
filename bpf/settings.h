/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* What the server chose when it loaded the programs: constants to the verifier, which drops what is not chosen. */
#ifndef SETTINGS_H
#define SETTINGS_H

#include <bpf/bpf_helpers.h>

#include "portolan.h"

const volatile struct filter_settings settings SEC(".rodata.settings");

#endif
