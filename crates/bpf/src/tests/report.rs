//! Sizes and speeds, printed for the reader; speeds are only asserted to exist.

use portolan_types::Protocol;

use super::bed::{Bed, CHANNEL, OWN_MAC, flows, row};
use super::frames::Frame;

/// Limit of the instructions that the verifier processes for one program; if it does not recognise that
/// iterations are alike, there are hundreds of thousands.
const VERIFIED_MOST: u32 = 30_000;

#[test]
fn report_of_program_sizes_and_nanoseconds_per_packet() {
    let bed = Bed::new();
    for (name, instructions, verified) in bed.program_sizes() {
        println!("{name}: {instructions} instructions, {verified} verified");
        // Every start of the server waits for the verifier, about half a millisecond per thousand.
        assert!(verified < VERIFIED_MOST, "{name}: {verified}");
    }
    let [tcp, _] = flows(Protocol::Tcp);
    let [udp, _] = flows(Protocol::Udp);
    bed.filter.steer(&tcp, row(CHANNEL)).unwrap();
    let drain = || drop(bed.records());
    for payload in [1, 1460, 3000] {
        let frame = Frame {
            payload,
            ..Frame::received(&tcp)
        }
        .build();
        let time = bed.time("packet_filter", &frame, drain);
        println!("deliver {:4} bytes: {time:?}", frame.len());
    }
    let stranger = Frame::received(&udp).build();
    println!(
        "pass to the kernel:  {:?}",
        bed.time("packet_filter", &stranger, || ())
    );
    let frame = Frame::sent(&tcp, OWN_MAC).build();
    println!(
        "transmit:            {:?}",
        bed.time("transmit_filter", &frame, || ())
    );
}
