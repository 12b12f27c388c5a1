//! Congestion control on links that both stacks share.

use std::fs;
use std::time::Duration;

use portolan_bench::bed::{Bed, Side};
use portolan_bench::process::run;
use portolan_netns::Impairment;
use portolan_programs::{bed_with, each_pairing};

const PORT: u16 = 7020;

/// Makes a bed whose link marks before it drops, and whose hosts request ECN on both stacks.
fn marking_bed() -> Bed {
    let wire = portolan_netns::Bed::impaired(Impairment {
        rate: Some(20_000_000),
        delay: Duration::from_millis(5),
        buffer: 400_000,
        mark_above: Some(40_000),
        ..Impairment::default()
    });
    wire.set_kernel_congestion("cubic");
    for host in [&wire.a, &wire.b] {
        host.enter(|| fs::write("/proc/sys/net/ipv4/tcp_ecn", "1"))
            .expect("a namespace has its own tcp_ecn");
    }
    bed_with(wire, "ecn = \"request\"\n")
}

#[test]
fn marks_hold_senders_of_both_stacks_back_before_anything_is_lost() {
    each_pairing(&marking_bed(), |bed, pairing| {
        let before = bed.counters();
        let endpoint = bed.endpoint(PORT).to_string();
        let words = [endpoint.as_str(), "--seconds", "2"];
        let serve = [&["measure"], &words[..]].concat();
        let _receiver = bed
            .serve(pairing.server, PORT, "portolan-traffic", &serve)
            .unwrap_or_else(|error| panic!("{error}"));
        let mut flows = bed.command(Side::Client, pairing.client, "portolan-traffic");
        let report = run(flows.arg("flows").args(words)).unwrap_or_else(|error| panic!("{error}"));
        let after = bed.counters();
        assert!(after.marked > before.marked, "{pairing:?}: {report}");
        assert_eq!(after.overflowed, before.overflowed, "{pairing:?}: {report}");
    });
}
