//! A stream's buffer (MS Figs. 11 to 13): copying bytes into a new buffer, referring to bytes in place from a frame,
//! and prepending a header.

use portolan_stack::Frame;
use portolan_tcp::ByteRing;

use super::{Clock, Curves, SIZES};

/// Bytes of Ethernet, IPv4, and TCP headers with timestamps.
const HEADER: usize = 66;

pub(crate) fn measure(clock: Clock) -> Curves {
    let mut curves = Curves::new();
    for size in SIZES {
        let data = vec![0x5a; size];
        let mut full = ByteRing::default();
        full.push(&data);
        let mut add = |name, nanoseconds| {
            let curve: &mut Vec<_> = curves.entry(name).or_default();
            curve.push([size as f64, nanoseconds]);
        };
        add(
            "copy",
            clock.measure(|| {
                let mut ring = ByteRing::default();
                ring.push(&data);
                ring
            }),
        );
        // A ring in use has allocated its memory.
        let mut ring = ByteRing::default();
        add(
            "copy-in-use",
            clock.measure(|| {
                ring.push(&data);
                ring.consume(size);
            }),
        );
        let ring = std::hint::black_box(full);
        add("duplicate", clock.measure(|| ring.slices(0, size)));
        let header = [0x11; HEADER];
        let mut head = [0; HEADER];
        add(
            "link",
            clock.measure(|| {
                head.copy_from_slice(std::hint::black_box(&header));
                let payload = ring.slices(0, size);
                Frame {
                    head: &head,
                    payload,
                }
                .length()
            }),
        );
    }
    curves
}
