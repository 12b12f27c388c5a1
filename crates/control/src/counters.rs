//! The server's own counters: every refusal, drop and fallback has a name here.

use portolan_proto::control::KernelReason;
use portolan_proto::report::{CounterReport, SharedReason};
use portolan_stack::FragmentCounters;

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// One counter per event.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $field: u64,)* }

        impl Counters {
            fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$(($name, self.$field),)*]
            }
        }
    };
}

counters! {
    /// Processes that said `Hello`.
    processes = "processes",
    /// Control connections closed for a malformed or illegal message.
    malformed = "malformed_messages",
    /// Control connections closed because replies were not read.
    deaf = "deaf_clients",
    /// Requests of programs.
    requests = "requests",
    /// Requests answered with an error.
    refused = "refused_requests",
    /// Refusals because a user, or all users but root, had reached a limit: control connections, processes, sessions,
    /// rows in the table of bindings, ports that several sockets share.
    connections_refused = "budget_connections_refused",
    processes_refused = "budget_processes_refused",
    sessions_refused = "budget_sessions_refused",
    bindings_refused = "budget_bindings_refused",
    shared_ports_refused = "budget_shared_ports_refused",
    groups_refused = "budget_groups_refused",
    /// Lists that were not given, since the answer before was not read yet, or those of the user take too many bytes.
    lists_refused = "budget_lists_refused",
    /// Times that requests of a user waited for the next turn.
    slices_spent = "budget_turns_spent",
    /// Times that a connection was not read for a while because its user's requests had used up their share of the
    /// time.
    shares_spent = "budget_shares_spent",
    /// Times that a relayed descriptor was not read because the server held as much for its user as allowed.
    relays_stalled = "budget_relays_stalled",
    /// Closed connections that were reset: their user had too many, or too much unsent, or their peer acknowledged
    /// nothing for too long.
    orphans_reset = "orphans_reset",
    /// System calls of the server that its own seccomp filter refused.
    calls_refused = "refused_system_calls",
    /// Requests for guarantees that were not granted.
    guarantees_refused = "guarantees_refused",
    /// Guarantees of the previous server that were granted again, and that were refused.
    guarantees_renewed = "guarantees_renewed",
    guarantees_lost = "guarantees_lost",
    /// Raw flows: EtherTypes or IP protocol numbers opened by programs.
    raw_flows = "raw_flows_opened",
    /// Protocol extensions installed, not admitted, and removed because they took too long.
    extensions = "extensions_installed",
    extensions_refused = "extensions_refused",
    extensions_over_budget = "extensions_over_budget",
    opens = "active_opens",
    open_failures = "failed_opens",
    accepts = "passive_opens",
    /// Delegated listeners, connections that processes registered, and those returned unaccepted.
    delegations = "listeners_delegated",
    claims = "connections_claimed",
    surrenders = "connections_surrendered",
    /// Ports leased to processes; connections that a process had opened or accepted, and not registered: closed and handed
    /// to the server, and lost with the process, so that their peers were probed.
    leases = "ports_leased",
    closed_unregistered = "unregistered_closed",
    lost_unregistered = "unregistered_lost",
    kernel_accepts = "kernel_accepts",
    /// Sockets of a previous server's sessions that a process reopened, and processes that found theirs reopened
    /// already.
    reopened = "sessions_reopened",
    rejoined = "sessions_rejoined",
    /// Connections that the previous server held, and this one has taken up.
    taken_up = "connections_taken_up",
    /// Connections of the previous server that their process has continued, was refused, and those that were reset because
    /// no process named them in time. Channels that were not given to who showed their ring; servers whose tables could
    /// not be taken over.
    adopted = "connections_adopted",
    adoptions_refused = "adoptions_refused",
    abandoned = "connections_abandoned",
    channels_refused = "channels_refused",
    inheritances_refused = "inheritances_refused",
    kernel_datagrams = "kernel_datagrams",
    /// Unread datagrams of sockets that fell back to the kernel: put into the kernel socket, and lost.
    unread_handed_over = "unread_datagrams_handed_over",
    unread_lost = "unread_datagrams_lost",
    /// Accepted sessions that waited in the server for their first use.
    delayed = "sessions_delayed",
    /// Opens that led to a Portolan listener on this host.
    local_sessions = "local_sessions",
    handoffs = "sessions_cached",
    flushes = "sessions_flushed",
    /// Sessions with a ring of their own, and sessions refused one: the process, or the host, has reached its limit;
    /// each packet is a message anyway; the kernel, or the process, could not make it.
    direct_mappings = "sessions_mapped_directly",
    direct_process_limit = "direct_refused_process_limit",
    direct_host_limit = "direct_refused_host_limit",
    direct_delivery = "direct_refused_delivery",
    direct_not_made = "direct_refused_not_made",
    /// Times that the packet filter was attached again to a device from which it had been removed.
    hooks_restored = "hooks_restored",
    /// Devices configured for the packet filter in their driver, which could not be attached there.
    driver_hooks_refused = "driver_hooks_refused",
    /// Demux handles given to processes for their sessions (active demultiplexing).
    handles_given = "handles_given",
    /// Sessions without a handle because all were in use.
    handles_lacking = "handles_lacking",
    /// Bytes of all capsules sent and received, with unread and unacknowledged data.
    capsule_bytes = "capsule_bytes",
    /// Sessions recalled from the process that held them.
    recalls = "sessions_recalled",
    /// Relayed sessions that a library cached again.
    relays_ended = "relays_ended",
    /// Processes that did not give a session back in time.
    recall_timeouts = "recall_timeouts",
    aborts = "sessions_aborted",
    reinjected = "reinjected_frames",
    reinject_failed = "reinject_failures",
    resets = "resets_sent",
    /// Resets for segments without a connection, above the rate limit.
    resets_withheld = "resets_withheld",
    syn_dropped = "syns_dropped_queue_full",
    cookies_sent = "syn_cookies_sent",
    cookies_taken = "syn_cookies_accepted",
    cookies_bad = "syn_cookies_refused",
    /// Floods of SYNs that were handed over to the packet filter.
    floods = "syn_floods",
    fast_opens = "fast_opens_with_text",
    fast_accepts = "fast_opens_accepted",
    fast_open_refused = "fast_open_cookies_refused",
    fast_open_overflow = "fast_open_queue_overflows",
    accept_overflow = "accept_queue_overflows",
    /// Times that new work had to wait, or was refused, for lack of descriptors in the server.
    descriptors_short = "descriptors_short",
    dropped = "frames_dropped",
    /// Segments below `IP_MINTTL` of a listener.
    too_far = "segments_dropped_min_ttl",
    /// Transmit reservations made or changed, and those ended by the exit of their process.
    reservations = "transmit_reservations",
    reservations_orphaned = "transmit_reservations_orphaned",
    /// Links whose rate changed, and links that disappeared.
    links_changed = "links_changed",
    links_lost = "links_lost",
    /// Transmit guarantees reduced, suspended, and restored.
    guarantees_scaled = "guarantees_scaled",
    guarantees_suspended = "guarantees_suspended",
    guarantees_restored = "guarantees_restored",
    /// Reservations of flows and ports whose sessions share the process's transmit queue because it has too many.
    tx_queues_refused = "tx_queues_refused",
    /// Transmit queues not available, or not in use, after a second: their sessions shared the process's queue until
    /// then.
    tx_queues_late = "tx_queues_late",
    bad_capsules = "capsules_refused",
    time_wait_evicted = "time_wait_evictions",
    wire_overflow = "tap_backlog_drops",
    use_kernel_local = "use_kernel_local_address",
    use_kernel_unmanaged = "use_kernel_unmanaged_device",
    use_kernel_no_route = "use_kernel_no_route",
    use_kernel_not_unicast = "use_kernel_not_unicast",
    use_kernel_unsupported = "use_kernel_unsupported",
    use_kernel_policy = "use_kernel_policy",
    /// Times that the host's first netfilter or policy rule appeared, or its last one disappeared.
    policy_changes = "host_policy_changes",
}

impl Counters {
    pub fn use_kernel(&mut self, reason: KernelReason) {
        *match reason {
            KernelReason::LocalAddress => &mut self.use_kernel_local,
            KernelReason::UnmanagedDevice => &mut self.use_kernel_unmanaged,
            KernelReason::NoRoute => &mut self.use_kernel_no_route,
            KernelReason::NotUnicast => &mut self.use_kernel_not_unicast,
            KernelReason::Unsupported => &mut self.use_kernel_unsupported,
            KernelReason::Policy => &mut self.use_kernel_policy,
        } += 1;
    }

    pub fn direct_refused(&mut self, reason: SharedReason) {
        *match reason {
            SharedReason::ProcessLimit => &mut self.direct_process_limit,
            SharedReason::HostLimit => &mut self.direct_host_limit,
            SharedReason::Delivery => &mut self.direct_delivery,
            SharedReason::NotMade => &mut self.direct_not_made,
        } += 1;
    }

    /// Returns all counters, with the stack's counters of fragmented datagrams.
    pub fn report(&self, fragments: FragmentCounters, unclaimed: u64) -> Vec<CounterReport> {
        let fragments = [
            ("datagrams_reassembled", fragments.reassembled),
            ("reassembly_timeouts", fragments.timed_out),
            ("fragments_overlapping", fragments.overlapping),
            ("reassembly_evictions", fragments.crowded_out),
            ("fragments_malformed", fragments.malformed),
            ("early_fragments_unclaimed", unclaimed),
        ];
        self.named()
            .into_iter()
            .chain(fragments)
            .map(|(name, value)| CounterReport {
                group: "server".to_owned(),
                name: name.to_owned(),
                value,
                holder: None,
            })
            .collect()
    }
}
