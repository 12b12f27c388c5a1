//! The server's own counters: every refusal, drop and fallback has a name here.

use portolan_proto::control::KernelReason;
use portolan_proto::report::CounterReport;
use portolan_stack::FragmentCounters;

macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// One number per thing that can happen.
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
    malformed = "malformed-messages",
    /// Control connections closed because nobody read the replies.
    deaf = "deaf-clients",
    /// Requests answered with an error.
    refused = "refused-requests",
    opens = "active-opens",
    open_failures = "failed-opens",
    accepts = "passive-opens",
    kernel_accepts = "kernel-accepts",
    handoffs = "sessions-cached",
    flushes = "sessions-flushed",
    aborts = "sessions-aborted",
    reinjected = "reinjected-frames",
    reinject_failed = "reinject-failures",
    resets = "resets-sent",
    syn_dropped = "syns-dropped-queue-full",
    cookies_sent = "syn-cookies-sent",
    cookies_taken = "syn-cookies-accepted",
    cookies_bad = "syn-cookies-refused",
    accept_overflow = "accept-queue-overflows",
    dropped = "frames-dropped",
    bad_capsules = "capsules-refused",
    time_wait_evicted = "time-wait-evictions",
    wire_overflow = "tap-backlog-drops",
    use_kernel_local = "use-kernel-local-address",
    use_kernel_unmanaged = "use-kernel-unmanaged-device",
    use_kernel_no_route = "use-kernel-no-route",
    use_kernel_not_unicast = "use-kernel-not-unicast",
    use_kernel_unsupported = "use-kernel-unsupported",
}

impl Counters {
    pub fn use_kernel(&mut self, reason: KernelReason) {
        *match reason {
            KernelReason::LocalAddress => &mut self.use_kernel_local,
            KernelReason::UnmanagedDevice => &mut self.use_kernel_unmanaged,
            KernelReason::NoRoute => &mut self.use_kernel_no_route,
            KernelReason::NotUnicast => &mut self.use_kernel_not_unicast,
            KernelReason::Unsupported => &mut self.use_kernel_unsupported,
        } += 1;
    }

    /// With what the stack counts of datagrams in fragments.
    pub fn report(&self, fragments: FragmentCounters, unclaimed: u64) -> Vec<CounterReport> {
        let fragments = [
            ("datagrams-reassembled", fragments.reassembled),
            ("reassembly-timeouts", fragments.timed_out),
            ("fragments-overlapping", fragments.overlapping),
            ("reassembly-evictions", fragments.crowded_out),
            ("fragments-malformed", fragments.malformed),
            ("early-fragments-unclaimed", unclaimed),
        ];
        self.named()
            .into_iter()
            .chain(fragments)
            .map(|(name, value)| CounterReport {
                group: "server".to_owned(),
                name: name.to_owned(),
                value,
            })
            .collect()
    }
}
