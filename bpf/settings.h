/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR MIT */
/* Settings chosen by the server at load time: constants for the verifier, which removes unused code. */
#ifndef SETTINGS_H
#define SETTINGS_H

#include <bpf/bpf_helpers.h>

#include "portolan.h"

const volatile struct filter_settings settings SEC(".rodata.settings");

#endif
