//! Relayed sessions that are reclaimed while their program keeps writing to them.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use portolan_netns::Bed;
use portolan_proto::control::{AfterFlush, Reader, ReplyBody, RequestBody};
use portolan_types::Slot;
use rustix::net::{SendFlags, send};

use crate::as_nobody;
use crate::budgets::resident_kib;
use crate::common::{Configuration, Library, control_path};
use crate::meter::Meter;

/// MiB of the user's relays and orphans.
const LIMITS: &str = "[limits]\nrelay_memory_per_user = 32\norphan_memory_per_user = 16\n";

/// Upper bound of the growth of the server: those, and what moves when a relay ends.
const MOST_KIB: u64 = (32 + 16 + 16) << 10;

/// Ends when the session is no longer relayed, or after `duration`. Returns how often the session was asked for.
pub(crate) fn reclaim_while_it_is_filled(
    path: &Path,
    peer: SocketAddr,
    duration: Duration,
) -> usize {
    let mut library = Library::start(path);
    let (id, near, slot) = library.open(peer);
    library.flush(id, slot, AfterFlush::Relay(Reader::Sender));
    let begun = Instant::now();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let chunk = [7; 1 << 16];
            // The caller may panic.
            while !is_over.load(Ordering::Relaxed) && begun.elapsed() < 2 * duration {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                if send(&near.0, &chunk, flags).is_err() {
                    thread::yield_now();
                }
            }
        });
        let mut count = 0;
        while begun.elapsed() < duration {
            let body = RequestBody::Cache {
                session: id,
                slot: Slot(9),
            };
            count += 1;
            let (reply, _) = library.client.ask_with(body, &[near.0.as_fd()]);
            if !matches!(reply, ReplyBody::Relayed) {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        count
    })
}

#[test]
fn a_relay_that_is_filled_while_it_ends_holds_nobody_up() {
    let bed = Bed::veth();
    let server = Configuration::new(&bed.a, LIMITS).start(&bed.a);
    let path = control_path(&bed.a);
    let any = SocketAddr::new(Bed::B4, 0);
    // Accepts the connections, and reads nothing.
    let peer = bed.b.enter(|| TcpListener::bind(any)).unwrap();
    let address = peer.local_addr().unwrap();
    let meter = Meter::start(&bed);
    let before = resident_kib(&server);
    let mut most = 0;
    let wanted: usize = as_nobody(|| {
        let rounds = (0..10).map(|_| {
            let wanted = reclaim_while_it_is_filled(&path, address, Duration::from_millis(100));
            most = most.max(resident_kib(&server));
            wanted
        });
        rounds.sum()
    });
    meter.finish();
    assert!(wanted >= 10);
    assert!(most < before + MOST_KIB, "{before} KiB, then {most}");
}
