//! Budgets: how much of a resource of the server's one user, and all together, may have. A charge is a
//! value that whatever uses the resource owns; dropped, it gives back what it took. The last part of
//! each resource is root's alone, so that no number of users keeps root out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;
use std::time::Duration;

use crate::errno::Errno;

#[cfg(test)]
mod tests;

const ROOT: u32 = 0;

/// Root may use the server for so many times as long as another user in one turn.
const SLICES_OF_ROOT: u32 = 4;

/// How much there is of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub total: u64,
    /// Of one user. Root has no such limit.
    pub per_user: u64,
    /// Only root gets the last so many.
    pub reserve: u64,
}

impl Limit {
    /// With a reserve in percent of all, which is one at least where there is more than one.
    pub fn with_reserve(total: u64, per_user: u64, percent: u8) -> Limit {
        let reserve = (total.saturating_mul(percent.into()) / 100).max(u64::from(percent > 0));
        Limit {
            total,
            per_user,
            reserve: reserve.min(total.saturating_sub(1)),
        }
    }
}

/// Why a charge is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exhausted {
    User,
    Total,
}

impl Exhausted {
    /// As Linux says it of descriptors and processes.
    pub fn errno_of_number(self) -> Errno {
        match self {
            Exhausted::User => Errno::MFILE,
            Exhausted::Total => Errno::NFILE,
        }
    }
}

impl From<Exhausted> for Errno {
    fn from(_: Exhausted) -> Errno {
        Errno::NOBUFS
    }
}

#[derive(Debug)]
struct Ledger {
    limit: Limit,
    used: u64,
    /// Users without any are not in it.
    users: HashMap<u32, u64>,
    refused: u64,
}

impl Ledger {
    fn check(&self, uid: u32, amount: u64) -> Result<(), Exhausted> {
        let by_user = self.users.get(&uid).copied().unwrap_or(0);
        if uid != ROOT && by_user.saturating_add(amount) > self.limit.per_user {
            return Err(Exhausted::User);
        }
        let kept = if uid == ROOT { 0 } else { self.limit.reserve };
        if self.used.saturating_add(amount).saturating_add(kept) > self.limit.total {
            return Err(Exhausted::Total);
        }
        Ok(())
    }

    fn add(&mut self, uid: u32, amount: u64) {
        self.used += amount;
        *self.users.entry(uid).or_default() += amount;
    }

    fn give_back(&mut self, uid: u32, amount: u64) {
        self.used = self.used.saturating_sub(amount);
        if let Entry::Occupied(mut user) = self.users.entry(uid) {
            let left = user.get().saturating_sub(amount);
            match left {
                0 => drop(user.remove()),
                left => *user.get_mut() = left,
            }
        }
    }
}

/// Of one resource. Copies are the same budget.
#[derive(Clone, Debug)]
pub struct Budget(Rc<RefCell<Ledger>>);

impl Budget {
    pub fn new(limit: Limit) -> Budget {
        Budget(Rc::new(RefCell::new(Ledger {
            limit,
            used: 0,
            users: HashMap::new(),
            refused: 0,
        })))
    }

    /// Charges a user; a refusal is counted.
    pub fn charge(&self, uid: u32, amount: u64) -> Result<Charge, Exhausted> {
        let mut ledger = self.0.borrow_mut();
        if let Err(exhausted) = ledger.check(uid, amount) {
            ledger.refused += 1;
            return Err(exhausted);
        }
        ledger.add(uid, amount);
        Ok(Charge {
            budget: self.clone(),
            uid,
            amount,
        })
    }

    pub fn used(&self) -> u64 {
        self.0.borrow().used
    }

    pub fn used_by(&self, uid: u32) -> u64 {
        self.0.borrow().users.get(&uid).copied().unwrap_or(0)
    }

    pub fn refused(&self) -> u64 {
        self.0.borrow().refused
    }
}

/// What somebody uses of a resource, until it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Budget,
    uid: u32,
    amount: u64,
}

impl Charge {
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Gives back what is more than `amount`.
    pub fn shrink_to(&mut self, amount: u64) {
        let surplus = self.amount.saturating_sub(amount);
        self.budget.0.borrow_mut().give_back(self.uid, surplus);
        self.amount -= surplus;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.0.borrow_mut().give_back(self.uid, self.amount);
    }
}

/// The time of the server's loop: how long each user has had it in this turn. Who has had its slice
/// is served again in the next turn, after the others, so that nobody loses time that nobody else wants.
#[derive(Debug)]
pub struct Slices {
    slice: Duration,
    spent: HashMap<u32, Duration>,
}

impl Slices {
    pub fn new(slice: Duration) -> Slices {
        Slices {
            slice,
            spent: HashMap::new(),
        }
    }

    pub fn begin_turn(&mut self) {
        self.spent.clear();
    }

    pub fn is_spent(&self, uid: u32) -> bool {
        let slice = match uid {
            ROOT => self.slice * SLICES_OF_ROOT,
            _ => self.slice,
        };
        self.spent.get(&uid).is_some_and(|spent| *spent >= slice)
    }

    pub fn spend(&mut self, uid: u32, time: Duration) {
        *self.spent.entry(uid).or_default() += time;
    }
}
