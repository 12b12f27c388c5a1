//! Budgets: how much of a server resource one user, and all users together, may have. A charge is a value owned by the
//! user of the resource; dropping it returns the amount. The last part of each resource is reserved for root, so that
//! no number of users locks root out.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;
use std::time::Duration;

use portolan_types::Instant;

use crate::errno::Errno;

#[cfg(test)]
mod tests;

const ROOT: u32 = 0;

/// Root's slice of a turn, as a multiple of another user's.
const SLICES_OF_ROOT: u32 = 4;

/// The limits of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub total: u64,
    /// Per user other than root, who has no such limit.
    pub per_user: u64,
    /// Amount at the end of `total` that only root gets.
    pub reserve: u64,
}

impl Limit {
    /// Returns a limit with a reserve in percent of `total`, at least one unit where `total` is more than one.
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
    /// Returns the errno that Linux has for descriptors and processes.
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
    /// Users without a charge are not in it.
    users: HashMap<u32, u64>,
    refused: u64,
}

impl Ledger {
    fn check(&self, uid: u32, amount: u64) -> Result<(), Exhausted> {
        if amount > self.room_of_user(uid) {
            return Err(Exhausted::User);
        }
        if amount > self.room_of_all(uid) {
            return Err(Exhausted::Total);
        }
        Ok(())
    }

    fn room(&self, uid: u32) -> u64 {
        self.room_of_user(uid).min(self.room_of_all(uid))
    }

    fn room_of_user(&self, uid: u32) -> u64 {
        let by_user = self.users.get(&uid).copied().unwrap_or(0);
        match uid {
            ROOT => u64::MAX,
            _ => self.limit.per_user.saturating_sub(by_user),
        }
    }

    /// Users other than root cannot take the reserve.
    fn room_of_all(&self, uid: u32) -> u64 {
        let kept = if uid == ROOT { 0 } else { self.limit.reserve };
        let total = self.limit.total.saturating_sub(kept);
        total.saturating_sub(self.used)
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

/// The budget of one resource. Clones share it.
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

    /// Changes the limit. Existing charges stay, even if they exceed it.
    pub fn set_limit(&self, limit: Limit) {
        self.0.borrow_mut().limit = limit;
    }

    /// Charges a user. Refusals are counted.
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

    /// Returns an empty charge for the user.
    pub fn open(&self, uid: u32) -> Charge {
        Charge {
            budget: self.clone(),
            uid,
            amount: 0,
        }
    }

    /// Returns how much more the user can be charged.
    pub fn room(&self, uid: u32) -> u64 {
        self.0.borrow().room(uid)
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

/// What a user has taken of a resource, until it is dropped.
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

    /// Gives back the amount above `amount`.
    pub fn shrink_to(&mut self, amount: u64) {
        let surplus = self.amount.saturating_sub(amount);
        self.budget.0.borrow_mut().give_back(self.uid, surplus);
        self.amount -= surplus;
    }
}

impl Charge {
    /// Charges the user for what is to be in use. Refusals are counted.
    pub fn grow_to(&mut self, amount: u64) -> Result<(), Exhausted> {
        let mut ledger = self.budget.0.borrow_mut();
        let more = amount.saturating_sub(self.amount);
        if let Err(exhausted) = ledger.check(self.uid, more) {
            ledger.refused += 1;
            return Err(exhausted);
        }
        ledger.add(self.uid, more);
        self.amount += more;
        Ok(())
    }

    /// Sets the charge to what is in use. Use that exists already is charged even above the limit; then there is no
    /// room for more ([`Budget::room`]).
    pub fn set(&mut self, amount: u64) {
        self.shrink_to(amount);
        let more = amount - self.amount;
        if more > 0 {
            self.budget.0.borrow_mut().add(self.uid, more);
            self.amount = amount;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.0.borrow_mut().give_back(self.uid, self.amount);
    }
}

/// Target length of a turn's requests; the slices of many users are shortened to meet it. A connection takes some exchanges,
/// each of which may wait for a turn.
const TURN: Duration = Duration::from_millis(1);

/// Lower bound of a slice.
const LEAST_SLICE: Duration = Duration::from_micros(25);

/// The time of the server's loop, by user, in this turn. A user whose slice is spent is served again in the next turn,
/// after the others; time that nobody else wants is not lost to it.
#[derive(Debug)]
pub struct Slices {
    /// The slice of a user when there are few.
    longest: Duration,
    slice: Duration,
    spent: HashMap<u32, Duration>,
}

impl Slices {
    pub fn new(slice: Duration) -> Slices {
        Slices {
            longest: slice,
            slice,
            spent: HashMap::new(),
        }
    }

    /// Begins a turn; the number of users is estimated by that of the last one.
    pub fn begin_turn(&mut self) {
        let users = u32::try_from(self.spent.len()).unwrap_or(u32::MAX).max(1);
        self.slice = (TURN / users).max(LEAST_SLICE).min(self.longest);
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

/// Limits on the server's time over more than a turn: of each second, one user's requests may take `percent`,
/// each charged at its measured cost. Root has no such limit.
#[derive(Debug)]
pub struct Shares {
    percent: u32,
    accounts: HashMap<u32, Account>,
}

/// The time a user has taken, less what has accrued to it since.
#[derive(Clone, Copy, Debug)]
struct Account {
    debt: Duration,
    at: Instant,
}

/// Time that may be taken at once.
const BURST: Duration = Duration::from_millis(250);

/// Number of accounts kept before those without debt are removed.
const ACCOUNTS: usize = 256;

impl Shares {
    pub fn new(percent: u32) -> Shares {
        Shares {
            percent,
            accounts: HashMap::new(),
        }
    }

    pub fn spend(&mut self, uid: u32, time: Duration, now: Instant) {
        if uid == ROOT {
            return;
        }
        let percent = self.percent;
        if self.accounts.len() > ACCOUNTS {
            self.accounts
                .retain(|_, account| !account.debt_at(now, percent).is_zero());
        }
        let nothing = Account {
            debt: Duration::ZERO,
            at: now,
        };
        let account = self.accounts.entry(uid).or_insert(nothing);
        *account = Account {
            debt: account.debt_at(now, percent) + time,
            at: now,
        };
    }

    /// Returns when the user may be served again; none if that is now.
    pub fn served_again(&self, uid: u32, now: Instant) -> Option<Instant> {
        let debt = self.accounts.get(&uid)?.debt_at(now, self.percent);
        let surplus = debt.checked_sub(BURST)?;
        // Waits for a part of the burst to accrue, so that the user is not woken for each request.
        Some(now + (surplus + BURST / 16) * 100 / self.percent)
    }
}

impl Account {
    fn debt_at(&self, now: Instant, percent: u32) -> Duration {
        let due = now.since(self.at) * percent / 100;
        self.debt.saturating_sub(due)
    }
}
