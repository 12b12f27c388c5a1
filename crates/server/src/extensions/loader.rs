//! The thread that links extensions and has them verified. Verification may take a while, and
//! nothing else should wait for it; and what the verifier permits depends on the privileges of the
//! calling thread, so this one has fewer than the server.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use portolan_bpf::Linkage;
use portolan_control::extensions::{Environment, link};
use portolan_control::{Budget, Charge, Limit};
use portolan_proto::extension::{Code, Cost};
use portolan_proto::qos::Refusal;
use portolan_sys::capability::Capability;
use portolan_sys::wait::EventNotifier;
use rustix::io::Errno;
use tracing::error;

use super::LoadRequest;

/// Limits of waiting orders, for all users and for one.
const WAITING: Limit = Limit {
    total: 32,
    per_user: 4,
    reserve: 4,
};

/// How many lines of the verifier's log go to the requester, the last ones.
const LINES: usize = 12;
const LONGEST_REASON: usize = 4096;

pub(super) struct Order {
    pub spec: LoadRequest,
    pub code: Code,
    /// Those that the extension had under the previous server; otherwise none.
    pub maps: Vec<OwnedFd>,
    /// Bytes of its maps.
    pub memory: u64,
}

/// A verified extension.
#[derive(Debug)]
pub(super) struct Ready {
    pub program: OwnedFd,
    pub maps: Vec<OwnedFd>,
    pub cost: Cost,
}

pub(super) struct Done {
    pub spec: LoadRequest,
    pub result: Result<Ready, Refusal>,
}

pub(crate) struct Loader {
    orders: Sender<Order>,
    done: Receiver<Done>,
    waiting: Budget,
    /// Charges in the order of the results.
    under_way: VecDeque<Charge>,
    pub notifier: Arc<EventNotifier>,
}

impl Loader {
    /// Starts the thread; `most` is the number of instructions that the verifier may have processed.
    pub(super) fn start(linkage: Arc<Linkage>, most: u32) -> Result<Loader, Errno> {
        let notifier = Arc::new(EventNotifier::new()?);
        let (orders, to_do) = mpsc::channel::<Order>();
        let (finished, done) = mpsc::channel();
        let ring = Arc::clone(&notifier);
        std::thread::spawn(move || {
            if let Err(errno) = Capability::Perfmon.renounce() {
                error!(%errno, "extensions are not verified as strangers: none is installed");
                return;
            }
            for mut order in to_do {
                let maps = std::mem::take(&mut order.maps);
                let result = load(&linkage, (&order, maps), most);
                let spec = order.spec;
                // Fails only when the server ends, and this thread with it.
                let _ = finished.send(Done { spec, result });
                ring.notify();
            }
        });
        Ok(Loader {
            orders,
            done,
            waiting: Budget::new(WAITING),
            under_way: VecDeque::new(),
            notifier,
        })
    }

    /// Returns false if too many orders wait.
    pub(super) fn order(&mut self, order: Order, uid: u32) -> bool {
        let Ok(charge) = self.waiting.charge(uid, 1) else {
            return false;
        };
        let is_ordered = self.orders.send(order).is_ok();
        if is_ordered {
            self.under_way.push_back(charge);
        }
        is_ordered
    }

    pub(super) fn finished(&mut self) -> VecDeque<Done> {
        self.notifier.drain();
        let finished: VecDeque<Done> = self.done.try_iter().collect();
        self.under_way.drain(..finished.len());
        finished
    }
}

fn refused(errno: i32, reason: String) -> Refusal {
    Refusal { errno, reason }
}

/// Makes the maps of an extension, or takes those that it had. Constants are the same in new ones, which are frozen.
fn maps_of(
    linkage: &Linkage,
    (code, given): (&Code, Vec<OwnedFd>),
) -> Result<Vec<OwnedFd>, Refusal> {
    let is_new = given.is_empty();
    let mut given = given.into_iter();
    let maps = code.maps.iter().map(|map| {
        let name = &map.name;
        let had = given.next();
        if is_new || map.is_constant {
            return linkage.create_map(map).map_err(|error| {
                let reason = format!("map {name:?}: the kernel says: {error}");
                refused(libc::ENOMEM, reason)
            });
        }
        had.filter(|had| linkage.is_map(map, had.as_fd()))
            .ok_or_else(|| refused(libc::EINVAL, format!("map {name:?} is another one")))
    });
    maps.collect()
}

fn load(
    linkage: &Linkage,
    (order, given): (&Order, Vec<OwnedFd>),
    most: u32,
) -> Result<Ready, Refusal> {
    let maps = maps_of(linkage, (&order.code, given))?;
    let descriptors: Vec<i32> = maps.iter().map(AsRawFd::as_raw_fd).collect();
    let environment = Environment {
        work: linkage.work(),
        views: linkage.views(),
        sendings: linkage.sendings(),
        managers: linkage.managers(),
    };
    let program = link(&order.code, &descriptors, &environment);
    let loaded = linkage.load(&program).map_err(|failure| {
        refused(
            failure.source.raw_os_error().unwrap_or(libc::EINVAL),
            format!(
                "the kernel's verifier refuses it ({}):\n{}",
                failure.source,
                end_of(&failure.log)
            ),
        )
    })?;
    if loaded.verified > most {
        return Err(refused(
            libc::E2BIG,
            format!(
                "the verifier went through {} instructions to see that it ends; a handler may need {most}",
                loaded.verified
            ),
        ));
    }
    let cost = Cost {
        instructions: program.len() as u32,
        verified: loaded.verified,
        memory: order.memory,
    };
    Ok(Ready {
        program: loaded.program,
        maps,
        cost,
    })
}

/// Returns the last lines; the last but one has the reason.
fn end_of(log: &str) -> String {
    let lines: Vec<&str> = log.trim_end().lines().collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    let text = last.join("\n");
    let from = text.len().saturating_sub(LONGEST_REASON);
    text.chars().skip(from).collect()
}

#[cfg(test)]
mod tests {
    use super::end_of;

    #[test]
    fn a_reason_is_the_end_of_the_verifiers_words() {
        let log: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let reason = end_of(&log);
        assert!(reason.starts_with("line 88\n"), "{reason}");
        assert!(reason.ends_with("line 99"), "{reason}");
        assert_eq!(end_of(""), "");
        assert!(end_of(&"x".repeat(1 << 20)).len() <= super::LONGEST_REASON);
    }
}
