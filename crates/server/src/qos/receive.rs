//! Receive budgets: which session has which, and their entries in the filter's table. The filter enforces them (ADR
//! 11).

mod serve;

use std::collections::BTreeSet;

use portolan_control::{Process, SessionEntry};
use portolan_proto::filter::{BUDGETS, Budget};
use portolan_proto::qos::{Receive, Scope};
use portolan_types::SessionId;

use super::scope::{breadth, covers, covers_process};
use crate::qos::request::{Outcome, refuse};

/// Budgets that one user other than root may have.
const PER_USER: usize = 64;

/// Below this, the price of a long frame would exceed the filter's number range.
const LEAST_BITS: u64 = 1000;
const LONGEST_BURST_MS: u32 = 60_000;

/// Rows to rewrite after a change, in parts: a user may have thousands of sessions.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    /// Sessions whose rows may need another budget.
    sessions: BTreeSet<SessionId>,
    /// Numbers to be freed when all rows are rewritten.
    freed: Vec<u16>,
}

/// All receive budgets, in order of precedence.
#[derive(Debug, Default)]
pub(super) struct Budgets(Vec<BudgetEntry>);

#[derive(Debug)]
struct BudgetEntry {
    /// Its number in the filter's table.
    index: u16,
    scope: Scope,
    /// The user that requested it.
    uid: u32,
    spec: Receive,
}

impl BudgetEntry {
    /// Root's budgets come first: no user can evade them by a narrower one.
    fn order(&self) -> (bool, u8) {
        (self.uid != 0, breadth(&self.scope))
    }

    /// Whether it applies to the session. A port that belongs to another user by now is not the requester's any more.
    fn is_for(&self, session: &SessionEntry, process: Option<&Process>) -> bool {
        let may = self.uid == 0 || self.uid == session.uid;
        may && (covers(&self.scope, session)
            || process.is_some_and(|process| covers_process(&self.scope, process)))
    }

    fn is_for_all_of(&self, process: &Process) -> bool {
        (self.uid == 0 || self.uid == process.uid) && covers_process(&self.scope, process)
    }
}

impl Budgets {
    pub(super) fn scopes(&self) -> impl Iterator<Item = &Scope> {
        self.0.iter().map(|held| &held.scope)
    }

    fn find(&self, scope: &Scope) -> Option<usize> {
        self.0.iter().position(|held| held.scope == *scope)
    }

    fn has_room_for(&self, uid: u32) -> bool {
        uid == 0 || self.0.iter().filter(|held| held.uid == uid).count() < PER_USER
    }

    /// Returns the number of the first matching budget, as used in rows; 0 for none.
    fn index_of(&self, is_meant: impl Fn(&BudgetEntry) -> bool) -> u16 {
        let held = self.0.iter().find(|held| is_meant(held));
        held.map_or(0, |held| held.index)
    }

    /// Returns a number that no row names.
    fn free_index(&self, named: &[u16]) -> Option<u16> {
        let is_free =
            |index: &u16| !named.contains(index) && self.0.iter().all(|held| held.index != *index);
        (1..BUDGETS).find(is_free)
    }
}

fn check(scope: &Scope, spec: &Receive) -> Outcome {
    if matches!(scope, Scope::Thread { .. }) {
        return refuse(
            libc::EINVAL,
            "a thread receives nothing of its own: name its process",
        );
    }
    if spec.packets.is_none() && spec.bits.is_none() && spec.priority.is_none() {
        return refuse(
            libc::EINVAL,
            "a receive budget is of packets, bits or a priority",
        );
    }
    if spec.packets == Some(0) {
        return refuse(libc::ERANGE, "at least one packet per second");
    }
    if spec.bits.is_some_and(|bits| bits < LEAST_BITS) {
        return refuse(
            libc::ERANGE,
            format!("at least {LEAST_BITS} bits per second"),
        );
    }
    if spec.burst_ms > LONGEST_BURST_MS {
        return refuse(
            libc::ERANGE,
            format!("a burst of at most {LONGEST_BURST_MS} ms"),
        );
    }
    match spec.priority {
        Some(priority) if priority > Budget::LAST => refuse(
            libc::ERANGE,
            format!("a priority from 0 to {}", Budget::LAST),
        ),
        Some(_) if !matches!(scope, Scope::Flow(_) | Scope::Port { .. }) => {
            refuse(libc::EINVAL, "only flows and ports have priorities")
        }
        _ => Ok(()),
    }
}

/// Converts to the filter's units, rounding up so that a unit never costs less than the rate says.
fn terms(spec: &Receive) -> Budget {
    Budget {
        packet_price: spec
            .packets
            .map_or(0, |rate| Budget::SECOND.div_ceil(rate.into())),
        byte_price: spec
            .bits
            .map_or(0, |rate| Budget::BYTE_SECOND.div_ceil(rate)),
        burst: Budget::SECOND / 1000 * u64::from(spec.burst_ms),
        priority: spec.priority.unwrap_or(Budget::LAST).into(),
        ..Budget::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Receive {
        Receive {
            packets: Some(1000),
            bits: None,
            burst_ms: 10,
            priority: None,
        }
    }

    fn refusal(scope: &Scope, spec: &Receive) -> Option<i32> {
        check(scope, spec).err().map(|refusal| refusal.errno)
    }

    #[test]
    fn senseless_specs_are_refused() {
        let user = Scope::User { uid: 1 };
        assert_eq!(refusal(&user, &spec()), None);
        let thread = Scope::Thread { tid: 1 };
        assert_eq!(refusal(&thread, &spec()), Some(libc::EINVAL));
        for (spec, errno) in [
            (
                Receive {
                    packets: None,
                    ..spec()
                },
                libc::EINVAL,
            ),
            (
                Receive {
                    packets: Some(0),
                    ..spec()
                },
                libc::ERANGE,
            ),
            (
                Receive {
                    bits: Some(999),
                    ..spec()
                },
                libc::ERANGE,
            ),
            (
                Receive {
                    burst_ms: u32::MAX,
                    ..spec()
                },
                libc::ERANGE,
            ),
            (
                Receive {
                    priority: Some(8),
                    ..spec()
                },
                libc::ERANGE,
            ),
            (
                Receive {
                    priority: Some(0),
                    ..spec()
                },
                libc::EINVAL,
            ),
        ] {
            assert_eq!(refusal(&user, &spec), Some(errno), "{spec:?}");
        }
    }

    #[test]
    fn prices_keep_to_the_rate_within_a_thousandth() {
        for rate in [1, 7, 1000, 999_983, 10_000_000] {
            let terms = terms(&Receive {
                packets: Some(rate),
                ..spec()
            });
            let kept = Budget::SECOND as f64 / terms.packet_price as f64;
            assert!(
                (1.0 - kept / f64::from(rate)).abs() < 1e-3,
                "{rate}: {kept}"
            );
        }
        for rate in [LEAST_BITS, 1_000_000, 99_999_999_977] {
            let terms = terms(&Receive {
                bits: Some(rate),
                ..spec()
            });
            let kept = Budget::BYTE_SECOND as f64 / terms.byte_price as f64;
            assert!((1.0 - kept / rate as f64).abs() < 1e-3, "{rate}: {kept}");
        }
    }

    #[test]
    fn the_price_of_the_longest_frame_fits() {
        for bits in [LEAST_BITS, u64::MAX] {
            let terms = terms(&Receive {
                bits: Some(bits),
                ..spec()
            });
            assert!(terms.byte_price.checked_mul(70_000).is_some());
            assert_ne!(terms.byte_price, 0);
        }
    }
}
